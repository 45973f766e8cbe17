"""Which backend gets the next jobs."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.routing import Place, Router


def test_the_least_loaded_with_room_is_first() -> None:
    rooms = {"a": Place(3, 5), "b": Place(3, 4), "c": Place(0, 0), "d": Place(-1, 0)}
    assert Router().places(rooms, 4) == ["b", "a", "b", "a"]


def test_a_backend_is_named_as_often_as_it_has_room_and_no_more_than_asked() -> None:
    rooms = {"a": Place(2, 0), "b": Place(1, 9)}
    assert Router().places(rooms, 10) == ["a", "a", "b"]
    assert Router().places(rooms, 1) == ["a"]
    assert Router().places(rooms, 0) == Router().places({}, 5) == []


def test_equals_take_turns_also_when_each_job_ends_before_the_next_comes() -> None:
    router = Router()
    idle = {name: Place(3, 0) for name in "abc"}
    got = []
    for _ in range(6):
        [name] = router.places(idle, 1)
        router.sent(name)
        got.append(name)
    assert got == [*"abc", *"abc"]


def test_places_that_came_to_nothing_cost_no_turn() -> None:
    router = Router()
    idle = {name: Place(3, 0) for name in "ab"}
    assert router.places(idle, 1) == router.places(idle, 1) == ["a"]


@given(
    rooms=st.dictionaries(
        st.sampled_from("abcde"), st.builds(Place, st.integers(-1, 5), st.integers(0, 9))
    ),
    most=st.integers(0, 20),
    before=st.lists(st.sampled_from("abcde"), max_size=5),
)
def test_each_place_is_one_of_the_least_loaded(
    rooms: dict[str, Place], most: int, before: list[str]
) -> None:
    router = Router()
    for name in before:
        router.sent(name)
    given_out: Counter[str] = Counter()
    order = router.places(rooms, most)
    for name in order:
        loads = {n: p.inflight + given_out[n] for n, p in rooms.items() if p.room > given_out[n]}
        assert loads[name] == min(loads.values())
        given_out[name] += 1
    assert len(order) == min(most, sum(max(0, p.room) for p in rooms.values()))
