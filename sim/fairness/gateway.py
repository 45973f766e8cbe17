"""A gateway: an order, the product's admission and turns, and what it learns of the engines."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from common.cost import Pricing, pricing
from common.keys import CLASSES, GROUPS, Policy
from common.settings import Fairness, ModelSettings
from common.wire import Usage
from dispatcher.admission import BATCH, HEADROOM, BackendLoad
from dispatcher.ahead import Ahead
from dispatcher.engines.facts import EngineFacts
from dispatcher.prefix import Prefixes
from dispatcher.routing import Place, Router, follow
from dispatcher.slots import Ceiling, ModelSlots
from dispatcher.turns import Round, Turn, View, engine_priority
from dispatcher.turns import Rules as Limits
from dispatcher.why import Why
from dispatcher.yields import Pressed, Yields
from sim.fairness.baselines import Waiting
from sim.fairness.jobs import Entry, Job
from sim.fairness.order import Order
from sim.fairness.prefixes import beginning
from sim.fairness.world import World

BUSY_S, IDLE_S = 0.1, 1.0
"""Time between polls of an engine, while jobs wait and while none does."""
LISTEN_S = 0.25
"""The gaps between tokens are told this often."""
CHARGE_S = 1.0
"""Running jobs are charged what they cost so far this often."""
POP_MAX = 64


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway goes about it. The defaults are Fairlane's."""

    limit: int = 3
    """Requests that may wait in an engine; for batch at most 1."""
    fairness: Fairness = "tokens"
    """What a job costs its user: see `common.cost`."""
    policy: Policy = "weighted"
    interactive_weight: float = 4.0
    floor: float = 0.02
    reserved: int | None = None
    """Slots kept for users with nothing in flight; None: Fairlane's rule."""
    slots: int | None = None
    """Slots of all engines; None: they are learned."""
    user_max: int = 0
    """Most jobs of one user in flight; 0: no limit."""
    headroom: int | None = None
    """Slots that batch leaves free in each engine, where that is more than Fairlane's rule."""
    batch_max: int | None = None
    """Most batch jobs in flight; None: no limit."""
    inflight_max: int | None = None
    """Most jobs of each class in flight; None: no limit."""
    priority: bool = False
    """Whether engines are told priorities."""
    yields: bool = True
    """Whether batch jobs are taken out of engines for others."""
    classes: bool = True
    """False: all jobs are of one class."""
    affinity: bool = True
    """Whether jobs follow the beginnings of their prompts."""
    lookahead: int = 0
    """As `prefix_lookahead`."""
    hop: float = 0.001
    """Seconds from the gateway to an engine, one way."""
    delay: float = 0.0
    """Seconds by which an engine's metrics are old."""
    metrics: bool = True
    """False: engines have none."""
    streams: bool = True
    """False: answers come whole."""
    usage: bool = True
    """False: engines do not tell the length of an answer."""
    tpot_s: float | None = None
    """Target of time per output token, for every class; None: no limit."""


class Gateway:
    """One leader. Everything it decides with is told by its own events and by polls."""

    def __init__(self, world: World, order: Waiting, rules: Rules) -> None:
        self.hop = rules.hop
        self._world = world
        self._order = order
        self._rules = rules
        self._jobs: dict[str, Job] = {}
        self._running: dict[str, str] = {}
        """Job -> class."""
        n = len(world.engines)
        self._loads = [BackendLoad() for _ in range(n)]
        self._engines = range(n)
        self._limits = {
            c: Limits(
                (rules.batch_max if c == BATCH else None) or rules.inflight_max, rules.user_max
            )
            for c in CLASSES
        }
        self._ceiling = ModelSlots(rules.slots, rules.reserved)
        self._router = Router()
        self._yields = Yields()
        self._prefixes = Prefixes()
        self._ahead = Ahead()
        self._beginnings: dict[str, list[bytes]] = {}
        """Of the prompts of jobs that wait."""
        self._pages: list[deque[tuple[float, EngineFacts]]] = [deque() for _ in range(n)]
        self._polled = -math.inf
        self._pricing: Pricing = pricing(ModelSettings(fairness=rules.fairness))
        self._heard = [engine.token_times(0.0) for engine in world.engines]
        world.at(0.0, self._poll)
        world.at(0.0, self._listen)
        world.at(CHARGE_S, self._charge)

    def arrive(self, now: float, job: Job) -> None:
        """Into the order, and out again if there is room."""
        a = job.arrival
        cls = a.cls if self._rules.classes else "standard"
        urgent = cls == "interactive" and self._rules.policy == "weighted"
        weight = a.weight * (self._rules.interactive_weight if urgent else 1.0)
        self._jobs[job.id] = job
        if a.blocks and self._rules.affinity:
            self._beginnings[job.id] = beginning(a.blocks)
        terms = self._pricing.terms(a.input, a.most)
        self._order.enqueue(Entry(id=job.id, user=a.user, cls=cls, terms=terms, weight=weight))
        self._round(now)

    def limit(self, now: float) -> int:
        """How many may be on their way to the first engine."""
        return max(self._rules.limit, self._loads[0].keeps_up(now))

    def first(self, now: float, job: Job) -> None:
        """One job less that may wait in the engine."""
        if self._streams(job):
            self._loads[job.engine].started(now, job.id)
            self._yields.gone(job.id)
            self._round(now)

    def _streams(self, job: Job) -> bool:
        return self._rules.streams and job.arrival.streams

    def end(self, now: float, job: Job) -> None:
        """A place is free, and the cost is known."""
        a = job.arrival
        self._loads[job.engine].started(now, job.id)
        tokens = a.output if self._rules.usage else None
        whole = not self._rules.priority
        self._loads[job.engine].ended(now, job.id, whole=whole, tokens=tokens)
        self._yields.gone(job.id)
        del self._running[job.id], self._jobs[job.id]
        usage, seconds = Usage(a.input, job.cached, a.output), now - (job.sent or now)
        cost = self._pricing.real(usage, seconds)
        self._order.settle(job.id, cost, self._pricing.unit(usage, seconds))
        self._round(now)

    def _charge(self, now: float) -> None:
        for job_id in self._running:
            job = self._jobs[job_id]
            if tokens := self._world.tokens(now, job):
                usage = Usage(job.arrival.input, job.cached, tokens)
                cost = self._pricing.real(usage, now - (job.sent or now))
                self._order.charge(job_id, cost)
        self._world.at(now + CHARGE_S, self._charge)

    def _listen(self, now: float) -> None:
        """The gaps between tokens since the last time."""
        for n, engine in enumerate(self._world.engines):
            told, before = engine.token_times(now), self._heard[n]
            self._heard[n] = told
            gaps, tokens = told.seconds - before.seconds, told.count - before.count
            self._loads[n].signal.gaps.add(now, gaps, tokens)
        self._world.at(now + LISTEN_S, self._listen)

    def _poll(self, now: float) -> None:
        """Read each engine's page, which is `delay` seconds old, and look again."""
        waits = any(self._order.waiting.values())
        due = waits or now - self._polled >= IDLE_S - 1e-9
        if due and not self._rules.metrics:
            self._round(now)
        elif due:
            self._polled = now
            for n, engine in enumerate(self._world.engines):
                pages = self._pages[n]
                pages.append((now, engine.facts(now)))
                while len(pages) > 1 and pages[1][0] <= now - self._rules.delay + 1e-9:
                    pages.popleft()
                facts = pages[0][1]
                load = self._loads[n]
                load.polled(now, facts, period=BUSY_S if waits else IDLE_S)
            self._round(now)
        self._world.at(now + BUSY_S, self._poll)

    # --- a round

    def _round(self, now: float) -> None:
        """Send what may go, and take back what makes room for it."""
        ceiling = self._ceiling.ceiling(now, [load.slots for load in self._loads],
                                        len(self._loads))  # fmt: skip
        turns = Round(GROUPS[self._rules.policy], self._limits, self._router)
        while (turn := turns.next(self._view(now, ceiling))) is not None:
            entries = self._pop(turn)
            for entry, place in zip(entries, self._placed(turn, entries), strict=False):
                self._send(now, entry, int(place), floor=turn.floor)
            turns.told(turn, len(entries))
        if turns.why is Why.RESERVED:
            self._ceiling.bound(now, sum(load.jobs for load in self._loads))
        if self._yields and isinstance(self._order, Order):  # others know no classes
            self._take_back(now, turns, self._order)

    def _pop(self, turn: Turn) -> list[Entry]:
        order, ahead, k = self._order, self._ahead, self._rules.lookahead
        if not k or not isinstance(order, Order):
            return order.pop(
                turn.classes, len(turn.places), anyone=turn.anyone, user_max=turn.user_max,
                floor=self._rules.floor,
            )  # fmt: skip
        entries = order.pop(
            turn.classes, len(turn.places), anyone=turn.anyone, user_max=turn.user_max,
            floor=self._rules.floor, lookahead=k,
            liked=ahead.liked(self._prefixes, turn.places),
        )  # fmt: skip
        for cls, user in dict.fromkeys((entry.cls, entry.user) for entry in entries):
            first = order.first(cls, user, k + 1)
            ahead.told((cls, user), [(job, self._beginnings.get(job, ())) for job in first])
        return entries

    def _take_back(self, now: float, turns: Round, order: Order) -> None:
        pressed = [self._pressed(now, n) for n in self._engines]
        for job_id in self._yields.take(now, pressed, turns.why, turns.held):
            job = self._jobs[job_id]
            if self._world.abort(now, job):
                self._loads[job.engine].ended(now, job_id)
                self._yields.gone(job_id)
                del self._running[job_id]
                order.requeue(job_id)

    def _pressed(self, now: float, n: int) -> Pressed:
        load, counts = self._loads[n], self._loads[n].counts(now)
        facts = load.facts if load.fresh(now) else None
        slots = self._slots(load)
        return Pressed(str(n), counts.inflight, counts.unstarted, load.others(), slots, facts)

    def _slots(self, load: BackendLoad) -> int | None:
        if self._rules.slots is not None:
            return self._rules.slots // len(self._loads)
        return None if load.slots.probed else load.slots.value

    def _placed(self, turn: Turn, entries: Sequence[Entry]) -> Sequence[str]:
        if not self._beginnings:
            return turn.places
        jobs = [self._beginnings.pop(entry.id, ()) for entry in entries]
        return follow(self._prefixes, turn.rooms, turn.places, jobs)

    def _view(self, now: float, ceiling: Ceiling) -> View:
        inflight = {c: sum(load.inflight(c) for load in self._loads) for c in CLASSES}

        def room(cls: str, floor: bool) -> Mapping[str, Place]:
            return {str(n): self._place(now, n, cls, floor) for n in self._engines}

        free = sum(self._yields.free(str(n)) for n in self._engines)
        return View(
            waiting=self._order.waiting, inflight=inflight, room=room, most=POP_MAX,
            busy_max=ceiling.busy_max, taken=sum(inflight.values()) - free, due=self._order.due(),
        )  # fmt: skip

    def _place(self, now: float, n: int, cls: str, floor: bool) -> Place:
        load, rules = self._loads[n], self._rules
        limit = rules.limit if floor or cls != BATCH else min(rules.limit, 1)
        slots = None if rules.slots is None else rules.slots // len(self._loads)
        known, headroom = slots or load.slots.value, HEADROOM
        if rules.headroom is not None and known:
            headroom = rules.headroom / known
        room = load.room(
            now, cls, limit, floor=floor, slots=slots, headroom=headroom, tpot_s=rules.tpot_s
        )
        return Place(room.n, load.counts(now).inflight, room.why)

    def _send(self, now: float, entry: Entry, engine: int, *, floor: bool) -> None:
        job = self._jobs[entry.id]
        self._running[entry.id] = entry.cls
        self._loads[engine].sent(now, entry.id, entry.cls, streams=self._streams(job))
        if entry.cls == BATCH and self._rules.yields and not floor:
            self._yields.sent(str(engine), entry.id, job.yields)
        self._router.sent(str(engine))
        priority = engine_priority(entry.cls, entry.inflight) if self._rules.priority else 0
        self._world.send(now, job, engine, self.hop, priority)
