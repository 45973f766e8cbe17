"""Which batch jobs are taken back, by hand and at random."""

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.engines.facts import EngineFacts
from dispatcher.why import Why
from dispatcher.yields import PATIENCE_S, YIELDS_MAX, Pressed, Yields


def batch(jobs: int, backend: str = "e", *, first: int = 0) -> Yields:
    yields = Yields()
    for n in range(first, first + jobs):
        yields.sent(backend, f"{backend}{n}", 0)
    return yields


def at(
    inflight: int, unstarted: int = 1, others: int = 1, slots: int | None = 4,
    facts: EngineFacts | None = None, name: str = "e",
) -> Pressed:  # fmt: skip
    return Pressed(name, inflight, unstarted, others, slots, facts)


def take(
    yields: Yields, *backends: Pressed, now: float = 0.0, why: Why = Why.OPEN,
    classes: Collection[str] = (),
) -> list[str]:  # fmt: skip
    return yields.take(now, backends, why, classes)


def says(waiting: int | None, kv: float | None = 0.5) -> EngineFacts:
    return EngineFacts(waiting, 4, kv)


@pytest.mark.parametrize(
    ("pressed", "taken"),
    [
        (at(5), ["e3"]),
        (at(4), []),
        (at(3), []),
        (at(7, 3, 3), ["e3", "e2", "e1"]),
        (at(7, 2, 2), ["e3", "e2"]),
        (at(99, 50, 50), ["e3", "e2", "e1", "e0"]),
        (at(6, 2, 1), ["e3", "e2"]),
        (at(6, 2, 0), []),
        (at(6, 2, 2, slots=None), []),
        (at(6, 2, 2, name="another"), []),
    ],
    ids=["one lacks a slot", "all slots taken", "a slot is free", "youngest first",
         "no more than are unstarted", "no more than there are",
         "a batch job waits before it", "only batch waits", "unknown", "another engine"],
)  # fmt: skip
def test_as_many_as_lack_a_slot(pressed: Pressed, taken: list[str]) -> None:
    assert take(batch(4), pressed) == taken


@pytest.mark.parametrize(
    ("why", "classes", "taken"),
    [
        (Why.LIMIT, ["interactive", "standard"], ["e3"]),
        (Why.SLOTS, ["standard"], ["e3"]),
        (Why.LIMIT, ["batch"], []),
        *((why, ["standard"], []) for why in Why if why not in (Why.LIMIT, Why.SLOTS)),
    ],
)
def test_for_those_outside_only_where_engines_are_full(
    why: Why, classes: list[str], taken: list[str]
) -> None:
    """Batch itself fills the engine's queue."""
    assert take(batch(4), at(5, 1, 0), why=why, classes=classes) == taken


def test_what_leaves_already_is_counted_until_it_is_gone() -> None:
    yields = batch(4)
    assert take(yields, at(5)) == ["e3"]
    assert take(yields, at(5)) == []
    assert take(yields, at(6, 2, 2)) == ["e2"]
    yields.gone("e3")
    assert take(yields, at(6, 2, 2)) == ["e1"], "a slot that it left is lacking all the same"
    assert yields.free("e") == 1


def test_engines_are_looked_at_each_for_itself() -> None:
    yields = batch(2, "e")
    for n in range(2):
        yields.sent("f", f"f{n}", 0)
    assert take(yields, at(5, 2, 2), at(6, 2, 2, name="f")) == ["e1", "f1", "f0"]
    assert (yields.free("e"), yields.free("f")) == (1, 0)


def test_an_answer_that_comes_cannot_be_taken_back() -> None:
    yields = batch(3)
    yields.gone("e2")
    yields.gone("e2")
    yields.gone("never heard of")
    assert take(yields, at(7, 3, 3)) == ["e1", "e0"]


def test_a_job_that_was_taken_back_often_is_left_alone() -> None:
    yields = Yields()
    for n in range(YIELDS_MAX + 2):
        yields.sent("e", f"e{n}", n)
    assert take(yields, at(99, 9, 9)) == [f"e{n}" for n in reversed(range(YIELDS_MAX))]


def test_where_slots_are_not_known_the_engine_has_to_say_so_for_a_while() -> None:
    yields, waits = batch(4), at(6, 2, 2, slots=None, facts=says(1))
    assert take(yields, waits, now=10.0) == []
    assert take(yields, waits, now=10.0 + PATIENCE_S - 0.01) == []
    assert take(yields, waits, now=10.0 + PATIENCE_S) == ["e3"]
    yields.gone("e3")
    assert take(yields, waits, now=10.1 + PATIENCE_S) == [], "it may not have been seen yet"
    assert take(yields, waits, now=10.1 + 2 * PATIENCE_S) == ["e2"]


@pytest.mark.parametrize(
    "between",
    [
        at(6, 2, 2, slots=None, facts=says(0)),
        at(6, 2, 2, slots=None, facts=says(None)),
        at(6, 2, 2, slots=None),
        at(6, 2, 2, slots=None, facts=says(1, kv=0.95)),
        at(6, 2, 0, slots=None, facts=says(1)),
    ],
    ids=["nobody waits", "not told", "stale", "memory is full", "only batch is unstarted"],
)
def test_a_pause_begins_anew(between: Pressed) -> None:
    yields, waits = batch(4), at(6, 2, 2, slots=None, facts=says(2))
    assert take(yields, waits, now=0.0) == []
    assert take(yields, between, now=PATIENCE_S) == []
    assert take(yields, waits, now=PATIENCE_S + 0.1) == []
    assert take(yields, waits, now=2 * PATIENCE_S + 0.1) == ["e3", "e2"]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["batch", "chat", "first", "end", "look", "look", "look"]),
        st.sampled_from("ef"), st.integers(0, 30), st.booleans(),
    ),
    max_size=120,
)  # fmt: skip
SLOTS = 4


class _Scene:
    """Two engines with SLOTS slots each, and a queue of batch jobs that are run again."""

    def __init__(self) -> None:
        self.yields = Yields()
        self.inside: dict[str, list[str]] = {"e": [], "f": []}
        """Jobs by engine, in the order in which they came; those of batch begin with b."""
        self.begun: set[str] = set()
        self.leaving: set[str] = set()
        self.times: dict[str, int] = {}
        self.again: list[str] = []
        self.count = 0

    def send(self, kind: str, engine: str) -> None:
        self.count += 1
        job = f"{kind[0]}{self.count}"
        if kind == "batch":
            job = self.again.pop(0) if self.again else job
            self.yields.sent(engine, job, self.times.setdefault(job, 0))
        self.inside[engine].append(job)

    def happen(self, kind: str, engine: str, n: int) -> None:
        jobs = self.inside[engine]
        if not jobs:
            return
        job = jobs[n % len(jobs)]
        if kind == "first":
            if job not in self.leaving:
                self.begun.add(job)
                self.yields.gone(job)
            return
        jobs.remove(job)
        self.begun.discard(job)
        if job in self.leaving:
            self.leaving.discard(job)
            self.times[job] += 1
            self.again.append(job)
        self.yields.gone(job)

    def look(self, outside: bool) -> None:
        backends, most = [], {}
        for name, jobs in self.inside.items():
            fresh = [j for j in jobs if j not in self.begun]
            others = sum(j[0] == "c" for j in fresh)
            backends.append(at(len(jobs), len(fresh), others, SLOTS, name=name))
            left = sum(j in self.leaving for j in jobs)
            asked = others or outside
            most[name] = max(0, min(len(jobs) - SLOTS, len(fresh)) - left) if asked else 0
        why = Why.LIMIT if outside else Why.GIVES_WAY
        taken = take(self.yields, *backends, why=why, classes=["standard"])
        for name, jobs in self.inside.items():
            here = [j for j in jobs if j in taken]
            may = [j for j in jobs if j[0] == "b" and j not in self.begun | self.leaving
                   and self.times[j] < YIELDS_MAX]  # fmt: skip
            assert here == may[len(may) - min(most[name], len(may)) :], "the youngest, as many"
        assert all(self.times[job] < YIELDS_MAX for job in taken), "batch goes on"
        assert not set(taken) & self.begun
        self.leaving |= set(taken)


@given(EVENTS)
def test_never_more_than_needed_nor_what_has_begun_and_each_at_most_so_often(
    events: list[tuple[str, str, int, bool]],
) -> None:
    scene = _Scene()
    for kind, engine, n, outside in events:
        if kind in ("batch", "chat"):
            scene.send(kind, engine)
        elif kind == "look":
            scene.look(outside)
        else:
            scene.happen(kind, engine, n)
    for engine in "ef":
        for _ in range(len(scene.inside[engine])):
            scene.happen("end", engine, 0)
    assert len(scene.yields) == 0 and scene.yields.free("e") == scene.yields.free("f") == 0
