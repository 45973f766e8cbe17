"""Who asks for the lead when, alone and in a simulated election over a model of the verb `lead`."""

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.jobs import Led
from dispatcher.election import ASK_S, RETRY_S, STAND_IN_S, STEADY_S, Election, preferred

MODEL = "m1"
NAMES = ("d-a-1", "d-b-2", "d-c-3")
FIRST = preferred(MODEL, NAMES)
SECOND = preferred(MODEL, set(NAMES) - {FIRST})


def leader(now: float = 0.0, me: str = FIRST) -> Election:
    """One that took the lead at `now`."""
    election = Election(me, MODEL)
    assert election.tick(now) == "take"
    election.led(now, Led("leader", term=7, owner=me))
    return election


# --- rendezvous hashing


def test_only_the_models_of_a_dispatcher_that_leaves_move() -> None:
    models = [f"model-{i}" for i in range(300)]
    before = {m: preferred(m, NAMES) for m in models}
    after = {m: preferred(m, NAMES[:2]) for m in models}
    assert all(after[m] == before[m] for m in models if before[m] != NAMES[2])
    assert all(60 < n < 140 for n in Counter(before.values()).values())
    assert preferred("m", []) == ""
    assert preferred("m", reversed(NAMES)) == preferred("m", NAMES)


# --- one of them alone


def test_the_lead_is_held_from_when_the_call_was_issued() -> None:
    election = Election(FIRST, MODEL)
    assert not election.may_pop(0)
    assert election.tick(0) == "take"
    assert election.wait(0) == math.inf
    assert election.tick(5) is None, "one call at a time"
    election.led(1.0, Led("leader", term=7))
    assert (election.term, election.leads, election.has_led) == (7, True, True)
    assert election.may_pop(1.79)
    assert not election.may_pop(1.81), "two seconds from its issue, less the margin"


def test_a_leader_renews_each_half_second() -> None:
    election = leader()
    assert election.tick(0.49) is None
    assert election.wait(0.4) == pytest.approx(0.1)
    assert election.tick(0.5) == "renew"
    assert election.may_pop(0.6)
    election.led(0.6, Led("leader", term=7))
    assert election.may_pop(2.2)
    assert election.wait(0.6) == pytest.approx(0.4)


def test_errors_are_tried_again_and_do_not_prolong_the_lead() -> None:
    election = leader()
    now, pauses = 0.5, []
    for _ in range(6):
        assert election.tick(now) == "renew"
        election.failed(now)
        pauses.append(election.wait(now))
        assert election.tick(now + pauses[-1] / 2) is None
        now += pauses[-1]
    assert pauses == pytest.approx([*RETRY_S, 0.5, 0.5])
    assert not election.may_pop(now)
    assert election.tick(now) == "renew"
    election.led(now, Led("leader", term=7))
    assert election.may_pop(now)


def test_a_leader_that_lost_asks_again_when_it_is_its_turn() -> None:
    for me, pause in ((FIRST, 0.0), (SECOND, STAND_IN_S)):
        election = leader(me=me)
        election.see(dict.fromkeys(NAMES, 0.0))
        assert election.tick(0.5) == "renew"
        election.led(0.6, Led("lost"))
        assert not election.leads and not election.may_pop(0.6)
        assert election.wait(0.6) == pytest.approx(pause)
        assert election.has_led


def test_the_preferred_one_asks_often_and_the_others_after_the_lease() -> None:
    first, second = Election(FIRST, MODEL), Election(SECOND, MODEL)
    for election in (first, second):
        election.see(dict.fromkeys(NAMES, 0.0))
    assert first.tick(0) == "take"
    assert second.tick(0) is None
    assert second.wait(0) == pytest.approx(STAND_IN_S)
    assert second.tick(STAND_IN_S) == "take"
    first.led(0.1, Led("held", owner="x", left_ms=1_800))
    second.led(0.4, Led("held", owner="x", left_ms=1_500))
    assert first.wait(0.1) == pytest.approx(ASK_S - 0.1)
    assert second.wait(0.4) == pytest.approx(1.5 + STAND_IN_S)


def test_the_lead_is_handed_to_a_preferred_one_that_is_steady() -> None:
    election = leader(100, SECOND)
    election.see({SECOND: 0.0, FIRST: 95.0})
    now = 100.0
    while (action := election.tick(now)) != "give":
        if action is not None:
            election.led(now, Led("leader", term=7))
        now += max(0.01, election.wait(now))
    assert now == pytest.approx(100 + STEADY_S, abs=0.51)
    assert not election.may_pop(now), "from the moment the call is issued"
    election.led(now, Led("given"))
    assert election.wait(now) == pytest.approx(2 + STAND_IN_S)


def test_a_preferred_one_that_comes_and_goes_is_given_nothing() -> None:
    election = leader(100, SECOND)
    for i in range(100):
        now = 100.5 + i / 2
        election.see({FIRST: now - now % 9})
        assert election.tick(now) == "renew"
        election.led(now, Led("leader", term=7))


def test_one_that_leaves_gives_up_at_once_and_for_good() -> None:
    election = leader()
    election.leave()
    assert election.wait(0.1) == 0
    assert election.tick(0.1) == "give"
    election.failed(0.2)
    assert not election.may_pop(0.2), "it may have been given up"
    assert election.tick(0.31) == "give"
    election.led(0.4, Led("given"))
    assert election.wait(0.4) == math.inf
    assert election.tick(1_000) is None


def test_one_that_leaves_gives_up_what_it_was_about_to_take() -> None:
    election = Election(FIRST, MODEL)
    assert election.tick(0) == "take"
    election.leave()
    election.led(0.1, Led("leader", term=7))
    assert election.tick(0.1) == "give"


# --- an election of several


class Verb:
    """The verb `lead` in plain Python: times in ms of Redis's clock."""

    def __init__(self) -> None:
        self.owner = ""
        self.term = 0
        self.deadline = 0.0

    def __call__(self, now: float, action: str, owner: str, term: int) -> Led:
        mine = (self.owner, self.term) == (owner, term)
        if action == "take":
            if self.owner not in ("", owner) and self.deadline > now:
                return Led("held", owner=self.owner, left_ms=int(self.deadline - now))
            self.owner, self.term = owner, max(self.term + 1, int(now))
        elif not mine:
            return Led("lost")
        self.deadline = 0.0 if action == "give" else now + 2_000
        return Led("given") if action == "give" else Led("leader", term=self.term, owner=owner)


class World:
    """Dispatchers, each with a clock of its own, and a Redis whose answers take time or get lost.

    `delays` are drawn for each call, in ms: (to Redis, back, fate); fate 0: the request is lost,
    1: the answer is lost, else none.
    """

    def __init__(self, delays: list[tuple[int, int, int]]) -> None:
        self.now = 0.0
        self.verb = Verb()
        self.alive: dict[str, Election] = {}
        self.since: dict[str, float] = {}
        self.popped = 0.0
        """Ms in which somebody could pop."""
        self._delays = itertools.cycle(delays)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def start(self, name: str) -> None:
        self.alive[name] = Election(name, MODEL)
        self.since[name] = self.now

    def kill(self, name: str) -> None:
        self.alive.pop(name, None)

    def clock(self, name: str) -> float:
        return self.now / 1_000 + 1_000 * NAMES.index(name)

    def leaders(self) -> list[str]:
        return [n for n, e in self.alive.items() if e.may_pop(self.clock(n))]

    def run(self, ms: float) -> None:
        end = self.now + ms
        while self.now < end:
            self.step(end)

    def until(self, done: Callable[[], bool], ms: float) -> float:
        began = self.now
        while not done():
            assert self.now < began + ms, f"not within {ms} ms"
            self.step(began + ms)
        return self.now - began

    def step(self, end: float) -> None:
        """To the next event or the time an election asked for; then nobody's lead may overlap.

        Leads end by time alone and begin with an event, so that no overlap falls between steps.
        """
        waits = (1 + 1_000 * e.wait(self.clock(n)) for n, e in self.alive.items())
        soonest = min(*waits, 100, self._events[0][0] - self.now if self._events else math.inf)
        took = min(max(soonest, 1), end - self.now)
        self.now += took
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        for name, election in self.alive.items():
            # One that died is still announced.
            offset = 1_000 * NAMES.index(name)
            election.see({n: at / 1_000 + offset for n, at in self.since.items()})
            action = election.tick(self.clock(name))
            if action is not None:
                self._call(name, election, action)
        assert len(self.leaders()) <= 1
        self.popped += took * len(self.leaders())

    def _at(self, delay: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._count), event))

    def _call(self, name: str, election: Election, action: str) -> None:
        there, back, fate = next(self._delays)

        def answer(reply: Led | None) -> None:
            if reply is None:
                election.failed(self.clock(name))
            else:
                election.led(self.clock(name), reply)

        def carry_out() -> None:
            # Also for one that died meanwhile: what was sent was sent.
            reply = self.verb(self.now, action, name, election.term)
            lost = fate == 1
            self._at(1_000 if lost else back, lambda: answer(None if lost else reply))

        if fate == 0:
            self._at(there, lambda: answer(None))
        else:
            self._at(there, carry_out)


PROMPT = [(1, 1, 9)]


@pytest.mark.parametrize("dies_after", range(0, 600, 70))
def test_a_dead_leader_is_replaced_within_three_seconds_and_gets_the_lead_back(
    dies_after: int,
) -> None:
    world = World([(3, 3, 9)])
    for name in NAMES:
        world.start(name)
    world.until(lambda: world.leaders() == [FIRST], 100)
    world.run(5_000 + dies_after)
    world.kill(FIRST)
    assert world.until(lambda: bool(world.leaders()), 3_000) > 1_000
    world.run(5_000)
    world.start(FIRST)
    assert world.until(lambda: world.leaders() == [FIRST], 13_000) > 9_500
    world.run(30_000)
    assert world.leaders() == [FIRST]


def test_a_leader_that_leaves_is_replaced_at_once_by_the_next_preferred() -> None:
    world = World(PROMPT)
    for name in NAMES:
        world.start(name)
    world.run(5_000)
    world.alive[FIRST].leave()
    del world.since[FIRST]
    assert world.until(lambda: world.leaders() == [SECOND], 2_400) > 0


def test_renewals_that_are_late_but_come_keep_the_lead() -> None:
    world = World([(400, 400, 9)])
    world.start(FIRST)
    world.start(SECOND)
    world.run(5_000)
    before = world.popped
    world.run(20_000)
    assert world.popped - before == 20_000


times = st.one_of(st.integers(0, 50), st.integers(0, 2_500))
calls = st.tuples(times, times, st.integers(0, 9))
steps = st.tuples(st.sampled_from(["kill", "start", "wait"]), st.sampled_from(NAMES), times)


@settings(deadline=None, max_examples=150)
@given(delays=st.lists(calls, min_size=1, max_size=40), story=st.lists(steps, max_size=12))
def test_never_two_may_pop_and_somebody_does_once_all_is_well(
    delays: list[tuple[int, int, int]], story: list[tuple[str, str, int]]
) -> None:
    world = World(delays)
    world.start(NAMES[0])
    for act, name, ms in story:
        if act == "kill":
            world.kill(name)
        elif act == "start" and name not in world.alive:
            world.start(name)
        world.run(ms)
    for name in NAMES:
        if name not in world.alive:
            world.start(name)
    world._delays = itertools.cycle(PROMPT)
    world.run(6_000)  # calls under way may take so long to come back
    world.until(lambda: bool(world.leaders()), 3_000)
    world.until(lambda: world.leaders() == [FIRST], 30_000)
    world.run(15_000)
    assert world.leaders() == [FIRST]


@pytest.mark.parametrize(
    ("giver", "pause"), [(FIRST, 0.0), ("d-x-9", STAND_IN_S)], ids=["the preferred", "another"]
)
def test_word_that_the_lead_was_given_up_saves_waiting_for_the_lease(
    giver: str, pause: float
) -> None:
    election = Election(SECOND, MODEL)
    election.see({FIRST: 0.0})
    assert election.wait(0) == STAND_IN_S
    assert election.tick(STAND_IN_S) == "take"
    election.led(STAND_IN_S, Led("held", owner=giver, left_ms=2_000))
    assert election.wait(1.0) == pytest.approx(1.6)
    election.freed(1.0, giver)
    assert election.wait(1.0) == pytest.approx(pause)


def test_a_leader_ignores_word_that_the_lead_is_free() -> None:
    election = leader()
    election.freed(0.1, SECOND)
    assert election.may_pop(0.2)
    assert election.wait(0.2) == pytest.approx(0.3)
