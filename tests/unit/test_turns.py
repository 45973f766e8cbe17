"""Whose turn it is."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.routing import Place, Router
from dispatcher.turns import Round, Rules, Turn, View, engine_priority
from dispatcher.why import Why

N, S, B = CLASSES = ("interactive", "standard", "batch")
WEIGHTED = (("live", (N, S)), ("batch", (B,)))
STRICT = ((N, (N,)), (S, (S,)), (B, (B,)))
NO_RULES = dict.fromkeys(CLASSES, Rules())


def view(
    *waiting: int, room: int | Mapping[str, int] = 3, floor_room: int | None = None,
    inflight: Mapping[str, int] | None = None, why: Why = Why.LIMIT, **more: object,
) -> View:  # fmt: skip
    """One backend, `a`. `room`: of it, for each class."""

    def rooms(cls: str, floor: bool) -> Mapping[str, Place]:
        n = room if isinstance(room, int) else room.get(cls, 0)
        n = floor_room if floor and floor_room is not None else n
        return {"a": Place(n, 0, Why.OPEN if n > 0 else why)}

    flying = {**dict.fromkeys(CLASSES, 0), **(inflight or {})}
    counts = dict(zip(CLASSES, waiting, strict=True))
    more = {"most": 64, "taken": sum(flying.values()), **more}
    return View(counts, flying, rooms, **more)  # type: ignore[arg-type]


def bare(turn: Turn | None) -> Turn | None:
    """Without the rooms, which are the view's."""
    return turn and msgspec.structs.replace(turn, rooms={})


def turns(groups: object = WEIGHTED, **rules: Rules) -> Round:
    return Round(groups, {**NO_RULES, **rules}, Router())  # type: ignore[arg-type]


def test_a_group_s_classes_go_together_and_lower_groups_wait() -> None:
    assert bare(turns().next(view(1, 2, 3))) == Turn("live", (N, S), ("a",) * 3, None, 0)
    assert bare(turns().next(view(0, 2, 3))) == Turn("live", (S,), ("a",) * 3, None, 0)
    assert bare(turns().next(view(0, 0, 3))) == Turn("batch", (B,), ("a",) * 3, None, 0)
    nothing = turns()
    assert nothing.next(view(0, 0, 0)) is None
    assert nothing.why is Why.OPEN


def test_strict_classes_are_groups_of_their_own() -> None:
    assert bare(turns(STRICT).next(view(1, 2, 3))) == Turn(N, (N,), ("a",) * 3, None, 0)
    assert bare(turns(STRICT).next(view(0, 2, 3))) == Turn(S, (S,), ("a",) * 3, None, 0)


def test_with_no_room_for_the_higher_the_lower_does_not_go() -> None:
    r = turns(STRICT)
    assert r.next(view(1, 1, 1, room={S: 5, B: 5})) is None
    assert r.why is Why.LIMIT


def test_the_common_room_first_then_what_only_one_has() -> None:
    r = turns()
    first = r.next(view(9, 9, 0, room={N: 1, S: 4}))
    assert bare(first) == Turn("live", (N, S), ("a",), None, 0)
    r.told(first, 1)
    second = r.next(view(9, 8, 0, room={N: 0, S: 3}))
    assert bare(second) == Turn("live", (S,), ("a",) * 3, None, 0)
    r.told(second, 3)
    assert r.next(view(9, 5, 0, room=0)) is None


def test_rooms_of_several_backends_are_compared_one_by_one() -> None:
    def room(cls: str, _: bool) -> Mapping[str, Place]:
        n = {N: (2, 0), S: (1, 3)}[cls]
        return {"a": Place(n[0], 0), "b": Place(n[1], 0)}

    zero = dict.fromkeys(CLASSES, 0)
    seen = View({N: 5, S: 5, B: 0}, zero, room, 64)
    turn = turns().next(seen)
    assert turn is not None
    assert turn.places == ("a",)


def test_nothing_left_ends_the_round_and_lets_the_lower_group_go() -> None:
    r = turns()
    turn = r.next(view(2, 2, 2))
    assert turn is not None
    r.told(turn, 1)
    after = r.next(view(1, 1, 2))
    assert after is not None
    assert after.group == "batch", "those that are left have as much as they may"
    r.told(after, 0)
    assert r.next(view(1, 1, 2)) is None
    assert r.why is Why.USER_LIMIT


def test_a_reply_that_was_cut_short_says_nothing_of_what_is_left() -> None:
    r = turns()
    turn = r.next(view(2, 0, 2))
    assert turn is not None
    r.told(turn, 1, cut=True)
    assert r.next(view(1, 0, 2)) == turn


# --- reserved slots


def test_beyond_busy_max_places_are_for_users_with_nothing_in_flight() -> None:
    for inflight, anyone in [(28, 3), (29, 2), (30, 1), (31, 0), (40, 0)]:
        turn = turns().next(view(5, 5, 5, busy_max=31, inflight={S: inflight - 1, B: 1}))
        assert turn is not None
        assert (turn.places, turn.anyone) == (("a",) * 3, anyone)


def test_what_is_reserved_is_not_for_lower_groups_while_the_higher_wait() -> None:
    r = turns()
    full = {"busy_max": 31, "inflight": {S: 31}}
    turn = r.next(view(5, 5, 5, **full))  # type: ignore[arg-type]
    assert turn is not None
    r.told(turn, 0)
    assert r.next(view(5, 5, 5, **full)) is None  # type: ignore[arg-type]
    assert r.why is Why.RESERVED


def test_that_nobody_idle_waits_is_remembered_until_anyone_may_go() -> None:
    r = turns()
    full = view(5, 5, 0, busy_max=31, inflight={S: 31})
    turn = r.next(full)
    assert turn is not None
    r.told(turn, 0)
    assert r.next(full) is None
    assert r.next(view(5, 0, 0, busy_max=31, inflight={S: 40})) is None, "nor any of some of them"
    after = r.next(view(5, 5, 0, busy_max=31, inflight={S: 30}))
    assert after is not None
    assert after.anyone == 1
    r.told(after, 1)
    assert r.next(full) is None
    again = turns().next(full)
    assert again is not None, "a new round asks"


def test_of_classes_that_were_not_asked_for_nothing_is_known() -> None:
    r = turns()
    turn = r.next(view(5, 0, 0, busy_max=31, inflight={S: 31}))
    assert turn is not None
    r.told(turn, 0)
    turn = r.next(view(5, 5, 0, busy_max=31, inflight={S: 31}))
    assert turn is not None
    assert turn.classes == (N, S)


# --- floor shares


def test_a_due_floor_share_goes_first_and_alone() -> None:
    turn = turns().next(view(5, 5, 5, room={N: 3, S: 3}, floor_room=3, due={"batch"}))
    assert bare(turn) == Turn("batch", (B,), ("a",), None, 0, True)
    both = turns(STRICT).next(view(5, 5, 5, due={S, B}))
    assert bare(both) == Turn(S, (S,), ("a",), None, 0, True)


def test_a_floor_share_without_jobs_or_room_is_passed_over() -> None:
    for seen in (
        view(5, 5, 0, due={"batch"}),
        view(5, 5, 5, due={"batch"}, floor_room=0),
        view(5, 5, 5, due={"batch"}, busy_max=31, inflight={N: 31}),
        view(5, 5, 5, due={"live"}),
    ):
        turn = turns().next(seen)
        assert turn is not None
        assert (turn.group, turn.floor) == ("live", False)


def test_a_floor_share_that_came_to_nothing_is_not_tried_again() -> None:
    r = turns()
    seen = view(5, 5, 5, due={"batch"})
    turn = r.next(seen)
    assert turn is not None
    r.told(turn, 0)
    after = r.next(seen)
    assert after is not None
    assert after.group == "live"


# --- limits of a class


def test_a_class_at_its_own_limit_holds_up_nobody() -> None:
    r = turns(interactive=Rules(inflight_max=4))
    turn = r.next(view(9, 9, 9, inflight={N: 2}))
    assert bare(turn) == Turn("live", (N, S), ("a",) * 2, None, 0)
    turn = r.next(view(9, 9, 9, inflight={N: 4}))
    assert bare(turn) == Turn("live", (S,), ("a",) * 3, None, 0)
    turn = r.next(view(9, 0, 9, inflight={N: 5}))
    assert bare(turn) == Turn("batch", (B,), ("a",) * 3, None, 0)
    assert r.next(view(9, 0, 0, inflight={N: 5})) is None
    assert r.why is Why.CLASS_LIMIT


def test_the_strictest_user_limit_holds_together_then_each_its_own() -> None:
    r = turns(interactive=Rules(user_max=2), standard=Rules(user_max=5))
    turn = r.next(view(9, 9, 0))
    assert turn is not None
    assert (turn.classes, turn.user_max) == ((N, S), 2)
    r.told(turn, 0)
    turn = r.next(view(9, 9, 0))
    assert turn is not None
    assert (turn.classes, turn.user_max) == ((S,), 5), "interactive's was asked for already"
    r.told(turn, 0)
    assert r.next(view(9, 9, 0)) is None


def test_no_limit_is_looser_than_any() -> None:
    r = turns(interactive=Rules(user_max=2))
    turn = r.next(view(9, 9, 0))
    assert turn is not None
    assert turn.user_max == 2
    r.told(turn, 1)
    turn = r.next(view(9, 9, 0))
    assert turn is not None
    assert (turn.classes, turn.user_max) == ((S,), 0)


# --- the rest


def test_a_look_asks_though_nothing_is_known_to_wait() -> None:
    turn = turns().next(view(0, 0, 0, look=True))
    assert turn is not None
    assert turn.classes == (N, S)


@pytest.mark.parametrize("why", [Why.KV, Why.SLOTS, Why.REFUSED, Why.STALE, Why.TPOT])
def test_why_is_what_the_backends_say(why: Why) -> None:
    r = turns()
    assert r.next(view(1, 0, 0, room=0, why=why)) is None
    assert r.why is why


def test_why_without_backends_or_with_too_many_runs() -> None:
    for most, why in [(0, Why.PROCESS), (-1, Why.PROCESS), (1, Why.LIMIT)]:
        r = turns()
        assert r.next(view(1, 0, 0, room=0, most=most)) is None
        assert r.why is why
    zero = dict.fromkeys(CLASSES, 0)
    assert r.next(View({**zero, S: 1}, zero, lambda cls, floor: {}, 64)) is None
    assert r.why is Why.NO_BACKEND


@pytest.mark.parametrize(
    ("cls", "inflight", "priority"),
    [
        (N, 0, 0),
        (N, 5_000, 999),
        (S, 0, 1_000),
        (S, 7, 1_007),
        (S, 10**6, 1_999),
        (B, 3, 1_000_003),
    ],
)
def test_priorities(cls: str, inflight: int, priority: int) -> None:
    assert engine_priority(cls, inflight) == priority


class Users:
    """A queue of users with jobs in one class each, popped as a turn says."""

    def __init__(self, jobs: dict[tuple[str, str], int]) -> None:
        self.jobs = {k: n for k, n in jobs.items() if n}
        self.inflight = dict.fromkeys(self.jobs, 0)

    def waiting(self) -> dict[str, int]:
        return {c: sum(n for (x, _), n in self.jobs.items() if x == c) for c in CLASSES}

    def flying(self) -> dict[str, int]:
        return {c: sum(n for (x, _), n in self.inflight.items() if x == c) for c in CLASSES}

    def pop(self, turn: Turn) -> int:
        for at in range(len(turn.places)):
            free = turn.anyone is None or at < turn.anyone
            may = [
                k for k, n in sorted(self.jobs.items())
                if n and k[0] in turn.classes and (free or not self.inflight[k])
                and (not turn.user_max or self.inflight[k] < turn.user_max)
            ]  # fmt: skip
            if not may:
                return at
            self.jobs[may[0]] -= 1
            self.inflight[may[0]] += 1
        return len(turn.places)


def left_no_place_unused(
    users: Users, groups: Any, rules: dict[str, Rules], slots: dict[str, int], busy_max: int | None
) -> None:
    """Nobody of the highest group that waits could have gone."""
    top = next((cs for _, cs in groups if any(users.waiting()[c] for c in cs)), ())
    total = sum(users.flying().values())
    for (cls, user), n in users.jobs.items():
        rule, own = rules[cls], users.inflight[cls, user]
        could = (
            cls in top and n and slots[cls] > total
            and (rule.inflight_max is None or users.flying()[cls] < rule.inflight_max)
            and (not rule.user_max or own < rule.user_max)
            and (busy_max is None or total < busy_max or own == 0)
        )  # fmt: skip
        assert not could, (cls, user)


@settings(deadline=None)
@given(
    jobs=st.dictionaries(
        st.tuples(st.sampled_from(CLASSES), st.sampled_from("uvw")), st.integers(0, 6), max_size=9
    ),
    groups=st.sampled_from([WEIGHTED, STRICT]),
    rules=st.fixed_dictionaries(
        {c: st.builds(Rules, st.none() | st.integers(1, 4), st.integers(0, 3)) for c in CLASSES}
    ),
    slots=st.fixed_dictionaries({c: st.integers(0, 8) for c in CLASSES}),
    busy_max=st.none() | st.integers(1, 8),
    due=st.sets(st.sampled_from([S, B])),
    look=st.booleans(),
)
def test_a_round_ends_keeps_every_limit_and_leaves_no_place_unused(
    jobs: dict[tuple[str, str], int], groups: object, rules: dict[str, Rules],
    slots: dict[str, int], busy_max: int | None, due: set[str], look: bool,
) -> None:  # fmt: skip
    users, r = Users(jobs), turns(groups, **rules)

    def room(cls: str, _: bool) -> Mapping[str, Place]:
        return {"a": Place(slots[cls] - sum(users.flying().values()), 0, Why.LIMIT)}

    def seen() -> View:
        flying = users.flying()
        taken = sum(flying.values())
        return View(users.waiting(), flying, room, 64, busy_max, taken, due, look)

    for _ in range(200):
        turn = r.next(seen())
        if turn is None:
            break
        before = dict(users.inflight)
        total = sum(before.values())
        taken = users.pop(turn)
        look = False
        if turn.floor:
            due.discard(turn.group)
        r.told(turn, taken)
        for key, n in users.inflight.items():
            if n > max(1, before[key]) and busy_max is not None:
                assert total < busy_max, "who had one got no reserved place"
            if n > before[key] and rules[key[0]].user_max:
                assert n <= rules[key[0]].user_max
        for cls in CLASSES:
            most = rules[cls].inflight_max
            assert most is None or users.flying()[cls] <= most
            if cls in turn.classes:
                assert sum(users.flying().values()) <= max(slots[cls], 0)
    else:
        raise AssertionError("the round does not end")
    if not look:  # else what is not known to wait in a higher group keeps the lower back
        left_no_place_unused(users, groups, rules, slots, busy_max)
    if r.why is Why.OPEN:
        assert not any(users.waiting().values())
