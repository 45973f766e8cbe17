"""What one model's leader knows as it decides whose turn it is: its backends, their slots and load,
against the model's settings. Nothing is asked or waited for here; time is an argument."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from common.keys import CLASSES
from common.metrics import DispatcherMetrics
from common.settings import ModelSettings
from dispatcher.admission import Room
from dispatcher.backends import Backend
from dispatcher.routing import Place
from dispatcher.slots import Ceiling, ModelSlots
from dispatcher.turns import Rules, View
from dispatcher.why import SAID, Why


class Facts:
    """Of one model. `backends` may grow while it is used."""

    def __init__(self, settings: ModelSettings, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._limits = {c: settings.queue_limit(c) for c in CLASSES}
        self._tpot_s = {c: settings.tpot_s(c) for c in CLASSES}
        self._total = settings.slots
        self._headroom = settings.batch_headroom
        self._slots = ModelSlots(settings.slots, settings.reserved_slots)
        self._waiting: Mapping[str, int] = {}
        """Jobs that waited at the end of the last round, and why."""
        self._why = Why.OPEN
        each = {c: settings.of_class(c) for c in CLASSES}
        self.rules: Mapping[str, Rules] = {
            c: Rules(s.inflight_max, s.user_inflight_max or 0) for c, s in each.items()
        }

    def view(
        self, now: float, waiting: Mapping[str, int], due: Collection[str], *, look: bool, most: int
    ) -> View:
        """For one decision, made at once. The arguments are as in `View`."""
        ceiling, usable = self._ceiling(now), self._usable(now)

        def room(cls: str, floor: bool) -> Mapping[str, Place]:
            rooms = self._rooms(now, cls, floor=floor)
            return {
                b.url: Place(free.n, b.load.counts(now).inflight, free.why) for b, free in rooms
            }

        inflight = {c: sum(b.load.inflight(c) for b in self._backends) for c in CLASSES}
        taken = sum(b.load.counts(now).inflight for b in usable)
        return View(waiting, inflight, room, most, ceiling.busy_max, taken, due, look)

    def close(self, now: float, waiting: Mapping[str, int], why: Why) -> None:
        """A round is over: so many jobs still wait, and why those do that might have had a turn."""
        self._waiting, self._why = waiting, why
        if why in (Why.RESERVED, Why.SLOTS):
            self._slots.bound(now)

    def reasons(self, now: float) -> dict[str, str]:
        """Why nothing is sent of each class that waits, in words; empty ones where there is room
        and it is others' turn."""
        return {c: self._reason(now, c) for c in CLASSES if self._waiting.get(c)}

    def _reason(self, now: float, cls: str) -> str:
        rooms = [room for _, room in self._rooms(now, cls)]
        if not rooms or any(room.n > 0 for room in rooms):
            return SAID.get(self._why if rooms else Why.NO_BACKEND, "")
        why, n = Counter(room.why for room in rooms).most_common(1)[0]
        text = next(room.reason for room in rooms if room.why is why)
        return text if len(rooms) == 1 else f"{text} ({n} of {len(rooms)} engines)"

    def measure(self, now: float, model: str, metrics: DispatcherMetrics) -> None:
        """Export what is known."""
        for cls in (c for c in CLASSES if self._waiting.get(c)):
            for b, room in self._rooms(now, cls):
                if room.n <= 0:
                    metrics.backend_closed(model, b.url, cls, room.why)
        for b in self._backends:
            counts = b.load.counts(now)
            metrics.backend(
                model, b.url, counts.inflight, counts.unstarted, counts.foreign, b.load.fresh(now)
            )
            metrics.tpot(model, b.url, b.load.tpot(now))
            for cls in CLASSES:
                metrics.inflight_max(model, b.url, cls, b.load.inflight_max(cls))
        ceiling = self._ceiling(now)
        metrics.slots(model, ceiling.slots or 0, ceiling.reserved)

    def _rooms(self, now: float, cls: str, *, floor: bool = False) -> list[tuple[Backend, Room]]:
        """What each backend has room for."""
        limit, share, ceiling = self._limits[cls], None, self._ceiling(now)
        if floor:  # batch's own limit is for what runs beside nobody
            limit = max(limit, self._limits["standard"])
        if self._total is not None and ceiling.slots is not None:
            share = ceiling.slots // len(self._usable(now))
        return [
            (b, b.room(now, cls, limit, floor=floor, slots=share, headroom=self._headroom,
                       tpot_s=self._tpot_s[cls]))
            for b in self._backends
        ]  # fmt: skip

    def _usable(self, now: float) -> list[Backend]:
        return [b for b in self._backends if b.usable(now)]

    def _ceiling(self, now: float) -> Ceiling:
        engines = [b.load.slots for b in self._usable(now)]
        return self._slots.ceiling(now, engines, len(self._backends))
