"""Which waiting jobs are named to a `pop`, by what is known of lanes and of backends."""

import pytest

from dispatcher.ahead import LANES_MAX, LIKED_MAX, Ahead
from dispatcher.prefix import Prefixes
from tests.unit.test_prefix import chain

LANE = ("standard", "u")


def knows(**backends: str) -> Prefixes:
    prefixes = Prefixes()
    for name, text in backends.items():
        prefixes.saw(name, chain(text))
    return prefixes


@pytest.mark.parametrize(
    ("prompt", "liked"),
    [("abcd", True), ("abcxx", True), ("abxx", False), ("axx", False), ("a", True), ("", False)],
)
def test_a_job_is_liked_where_six_tenths_of_its_beginning_are(prompt: str, liked: bool) -> None:
    """The same share from which on it follows."""
    ahead = Ahead()
    ahead.told(LANE, [("j", chain(prompt))])
    assert ahead.liked(knows(b="abcd"), ["b"]) == ["j"] * liked


def test_it_is_liked_for_the_backends_at_hand_alone() -> None:
    ahead = Ahead()
    ahead.told(LANE, [("one", chain("ab")), ("two", chain("xy"))])
    prefixes = knows(b="ab", c="xy")
    assert ahead.liked(prefixes, ["b"]) == ["one"]
    assert ahead.liked(prefixes, ["c", "b", "new"]) == ["one", "two"]
    assert ahead.liked(prefixes, ["new"]) == []


def test_a_lane_is_as_it_was_told_last() -> None:
    ahead, prefixes = Ahead(), knows(b="ab")
    ahead.told(LANE, [("one", chain("ab")), ("two", chain("ab"))])
    ahead.told(LANE, [("two", chain("ab"))])
    assert ahead.liked(prefixes, ["b"]) == ["two"]
    ahead.told(LANE, [])
    assert ahead.liked(prefixes, ["b"]) == []


def test_lanes_and_names_have_a_most() -> None:
    """Lanes popped from last are kept; of their jobs those popped from before are named first."""
    ahead, prefixes = Ahead(), knows(b="ab")
    for n in range(LANES_MAX + 1):
        ahead.told(("standard", f"u{n}"), [(f"j{n}{x}", chain("ab")) for x in "xy"])
    ahead.told(("standard", "u1"), [("last", chain("ab"))])
    liked = ahead.liked(prefixes, ["b"])
    assert (len(liked), liked[:2]) == (LIKED_MAX, ["j2x", "j2y"])
    for n in range(2, LANES_MAX + 1):
        ahead.told(("standard", f"u{n}"), [])
    assert ahead.liked(prefixes, ["b"]) == ["last"]
