"""What one model's leader knows as it decides whose turn it is: its backends, their slots and load,
against the model's settings. Nothing is asked or waited for here; time is an argument."""

from collections.abc import Collection, Mapping, Sequence

from common.jobs import Lease
from common.keys import CLASSES
from common.metrics import DispatcherMetrics
from common.settings import ModelSettings
from dispatcher.admission import BATCH, Room
from dispatcher.backend import Backend
from dispatcher.routing import Place
from dispatcher.slots import Ceiling, ModelSlots
from dispatcher.turns import Round, Rules, View
from dispatcher.why import SAID, Why, most_common
from dispatcher.yields import Pressed, Yields


def wanted(
    waiting: Mapping[str, int], inflight: Mapping[str, int], rules: Mapping[str, Rules]
) -> int:
    """Slots that the jobs which wait or run would take at once: over the classes, the sum of
    min(in flight + waiting, `inflight_max`)."""
    most = {c: rules[c].inflight_max for c in CLASSES}
    jobs = {c: inflight[c] + waiting[c] for c in CLASSES}
    return sum(n if (m := most[c]) is None else min(n, m) for c, n in jobs.items())


class Facts:
    """Of one model. `backends` may change while it is used."""

    def __init__(
        self, settings: ModelSettings, backends: Sequence[Backend], yields: Yields | None = None
    ) -> None:
        """`yields`: with the jobs that were sent by settings before these."""
        self._backends = backends
        self._yields = Yields() if yields is None else yields
        self._gives_way = settings.batch_yields
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

        taken = sum(b.load.counts(now).inflight - self._may_yield(b) for b in usable)
        return View(waiting, self._inflight(), room, most, ceiling.busy_max, taken, due, look)

    def spare(self, now: float, cls: str) -> Mapping[str, int]:
        """How many more jobs of a class each backend has room for."""
        return {b.url: room.n for b, room in self._rooms(now, cls)}

    def sent(self, lease: Lease, *, floor: bool) -> None:
        """A job goes to its backend; `floor`: for its class's floor share."""
        if self._gives_way and lease.cls == BATCH and not floor:
            self._yields.sent(lease.backend, lease.job, lease.yields)

    def kept(self, job: str) -> None:
        """It cannot be taken back any more: its answer comes, or it is not there any longer."""
        self._yields.gone(job)

    def yielding(self, now: float, turns: Round) -> list[str]:
        """The jobs that are to be taken back now, after the last of these turns."""
        if not self._gives_way or not self._yields:
            return []
        return self._yields.take(now, self._pressed(now), turns.why, turns.held)

    def closed(
        self, now: float, why: Why, waiting: Mapping[str, int], model: str,
        metrics: DispatcherMetrics, held: Collection[str] = (),
    ) -> None:  # fmt: skip
        """A round is over: so many jobs still wait, and why those do that might have had a turn
        (OPEN: none does), `held` the classes of whose jobs it is said."""
        self._waiting, self._why = waiting, why
        for cls, jobs in waiting.items():
            metrics.waiting(model, cls, jobs)
        if why is not Why.OPEN:
            metrics.closed(model, why)
        taken = sum(b.load.jobs for b in self._usable(now))
        batch = BATCH in held and waiting.get(BATCH) and self._slots.due(now, taken)
        if why is Why.RESERVED or (batch and self._learned_slots_hold(now, BATCH)):
            self._slots.bound(now, taken)

    def reasons(self, now: float) -> dict[str, str]:
        """Why nothing is sent of each class that waits, in words; empty ones where there is room
        and it is others' turn."""
        return {c: self._reason(now, c) for c in CLASSES if self._waiting.get(c)}

    def _reason(self, now: float, cls: str) -> str:
        rooms = [room for _, room in self._rooms(now, cls)]
        if not rooms or any(room.n > 0 for room in rooms):
            return SAID.get(self._why if rooms else Why.NO_BACKEND, "")
        why = most_common(room.why for room in rooms)
        n = sum(room.why is why for room in rooms)
        text = next(room.reason for room in rooms if room.why is why)
        return text if len(rooms) == 1 else f"{text} ({n} of {len(rooms)} engines)"

    def measure(
        self, now: float, model: str, metrics: DispatcherMetrics, waiting: Mapping[str, int]
    ) -> None:
        """Export what is known."""
        metrics.wanted(model, wanted(waiting, self._inflight(), self.rules))
        for cls in (c for c in CLASSES if self._waiting.get(c)):
            for b, room in self._rooms(now, cls):
                if room.n <= 0:
                    metrics.backend_closed(model, b.url, cls, room.why)
        for b in self._backends:
            counts, facts, fresh = b.load.counts(now), b.load.facts, b.load.fresh(now)
            told = fresh and facts is not None and facts.waiting is not None
            metrics.backend(
                model, b.url, counts.inflight, counts.unstarted, counts.foreign if told else None,
                fresh,
            )  # fmt: skip
            metrics.tpot(model, b.url, b.load.tpot(now))
            for cls in CLASSES:
                metrics.inflight_max(model, b.url, cls, b.load.inflight_max(cls))
        ceiling = self._ceiling(now)
        metrics.slots(model, ceiling.slots or 0, ceiling.reserved)

    def _rooms(self, now: float, cls: str, *, floor: bool = False) -> list[tuple[Backend, Room]]:
        """What each backend has room for."""
        limit, share = self._limits[cls], self._share(now)
        if floor:  # batch's own limit is for what runs beside nobody
            limit = max(limit, self._limits["standard"])
        return [
            (b, b.room(now, cls, limit, floor=floor, slots=share, headroom=self._headroom,
                       tpot_s=self._tpot_s[cls]))
            for b in self._backends
        ]  # fmt: skip

    def _inflight(self) -> dict[str, int]:
        return {c: sum(b.load.inflight(c) for b in self._backends) for c in CLASSES}

    def _may_yield(self, backend: Backend) -> int:
        """Slots of a backend that batch would give back."""
        return self._yields.free(backend.url) if self._gives_way else 0

    def _pressed(self, now: float) -> list[Pressed]:
        share = self._share(now)
        found = []
        for b in self._backends:
            counts, load = b.load.counts(now), b.load
            slots = share or (None if load.slots.probed else load.slots.value)
            facts = load.facts if load.fresh(now) else None
            found.append(
                Pressed(b.url, counts.inflight, counts.unstarted, load.others(), slots, facts)
            )
        return found

    def _learned_slots_hold(self, now: float, cls: str) -> bool:
        """Whether anywhere nothing but a number that was learned leaves no room for a class; the
        other backends have none for whatever reason."""
        return any(
            room.why is Why.SLOTS and b.load.slots.configured is None
            for b, room in self._rooms(now, cls)
        )

    def _share(self, now: float) -> int | None:
        """Slots of each backend where the model's are configured: one at least."""
        ceiling = self._ceiling(now)
        if self._total is None or ceiling.slots is None:
            return None
        return max(1, ceiling.slots // len(self._usable(now)))

    def _usable(self, now: float) -> list[Backend]:
        return [b for b in self._backends if b.usable(now)]

    def _ceiling(self, now: float) -> Ceiling:
        engines = [b.load.slots for b in self._usable(now)]
        return self._slots.ceiling(now, engines, len(self._backends))
