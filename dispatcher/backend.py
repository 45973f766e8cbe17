"""One backend as a dispatcher sees it: its load, and how it is."""

from common.settings import BackendSettings
from dispatcher.admission import HEADROOM, BackendLoad, Room
from dispatcher.engines.facts import EngineFacts
from dispatcher.engines.reading import Reading
from dispatcher.health import Health
from dispatcher.why import Why


class Backend:
    """One engine server as this dispatcher sees it.

    `model`: whose series on the metrics page count; None where it serves several.
    """

    def __init__(
        self,
        settings: BackendSettings,
        *,
        model: str | None = None,
        kv_max: float = 0.92,
        host: str | None = None,
    ) -> None:
        self.settings = settings
        self.url = settings.address
        self.host = host
        """The name and port whose address `url` has, told to the engine instead; None: `url`'s."""
        self.drained = False
        """Whether it gets no more jobs, because its source or an operator says so."""
        self.model = model
        self.load = BackendLoad(max_num_seqs=settings.max_num_seqs, kv_max=kv_max)
        self.health = Health()
        self.reading = Reading(settings.engine)
        """Which kind of engine it is, and where its metrics are."""
        self.models: tuple[str, ...] | None = None
        """Names it serves, as last read; None: never read."""
        self.metrics_up = False
        """Whether the last poll told anything."""

    @property
    def reachable(self) -> bool | None:
        """Whether its port takes connections; None: not tried yet."""
        return self.health.reachable

    def room(
        self, now: float, cls: str, limit: int, *, floor: bool = False, slots: int | None = None,
        headroom: float = HEADROOM, tpot_s: float | None = None,
    ) -> Room:  # fmt: skip
        """How many jobs of a class may be sent now, health and load considered."""
        if self.drained:
            return Room(0, "drained", Why.DRAINED)
        room = self.load.room(
            now, cls, limit, floor=floor, slots=slots, headroom=headroom, tpot_s=tpot_s
        )
        breaker = self.health.breaker
        if breaker.state(now) == "closed":
            n = self.health.room(now, room.n)
            if n == room.n:
                return room
            return Room(n) if n else Room(0, "slow start", Why.SLOW_START)
        n = breaker.room(now, room.n)
        if n or not room.n:
            return room if n == room.n else Room(n)
        why, text = (Why.SILENT, "silent") if breaker.silent else (Why.REFUSED, "refused")
        wait = breaker.wait(now)
        return Room(0, f"{text}, " + (f"next try in {wait:.1f} s" if wait else "on trial"), why)

    def usable(self, now: float) -> bool:
        """Whether its slots count: not while it refuses jobs or cannot be reached."""
        away = self.drained or self.reachable is False
        return not away and self.health.breaker.state(now) == "closed"

    def reconfigure(self, settings: BackendSettings, host: str | None) -> bool:
        """Its source says other things of the same address, or it is of another name; whether it
        is another kind of engine, for which polling has to begin anew."""
        other = settings.engine != self.settings.engine
        if other:
            self.reading = Reading(settings.engine)
        self.settings, self.host = settings, host
        self.load.slots.setting = settings.max_num_seqs
        return other

    def sent(self, now: float, job: str, cls: str, *, streams: bool) -> None:
        """This dispatcher sends a job there."""
        self.load.sent(now, job, cls, streams=streams)
        self.health.sent(now, job)

    def started(self, now: float, job: str) -> None:
        """The first byte of a job's answer came."""
        self.load.started(now, job)
        self.health.answered(now, job)

    def refused(self, now: float, job: str) -> None:
        """It refused a job before the first byte, and does not have it."""
        self.health.refused(now, job)
        self.load.ended(now, job)

    def ended(
        self, now: float, job: str, *, whole: bool = False, tokens: float | None = None
    ) -> None:
        """It does not have this job any more, for whatever reason; see `Flight.ended`."""
        self.load.ended(now, job, whole=whole, tokens=tokens)
        self.health.ended(now, job)

    def polled(self, now: float, facts: EngineFacts, *, period: float, asked_at: float) -> None:
        """Its metrics page was read: as for `BackendLoad.polled`."""
        self.load.polled(now, facts, period=period, asked_at=asked_at)
        self.health.polled(now, facts, asked_at)
        self.metrics_up = True

    def unread(self, now: float, *, refused: bool) -> None:
        """Its metrics page could not be read. `refused`: there was no connection."""
        self.load.poll_failed(now)
        self.metrics_up = False
        self.health.reached(now, not refused)

    def stalled(self, now: float, since: float, *, streams: bool) -> bool:
        """Whether it has had jobs `since` and its engine is dead: see `Health.stalled`."""
        facts = self.load.facts if self.load.fresh(now) else None
        return self.health.stalled(now, since, facts, streams=streams)
