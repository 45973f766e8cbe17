"""What a leader knows of computed beginnings, and where jobs go for them."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from common.wire import PREFIX_HASH_BYTES, PREFIX_HASHES_MAX
from dispatcher.prefix import Prefixes, split
from dispatcher.routing import LOAD_FACTOR, LOAD_SPARE, Place, Router, follow


def chain(text: str) -> list[bytes]:
    """A hash for each letter: that of all up to it."""
    return [text[: n + 1].encode() for n in range(len(text))]


def test_split() -> None:
    one, two = b"a" * PREFIX_HASH_BYTES, b"b" * PREFIX_HASH_BYTES
    assert split(b"") == split(b"abc") == []
    assert split(one + two + b"abc") == [one, two]
    assert len(split(one * 1_000)) == PREFIX_HASHES_MAX


def test_the_longest_match_of_each_backend() -> None:
    known = Prefixes()
    known.saw("a", chain("xyz"))
    known.saw("b", chain("xy"))
    known.saw("c", chain("pq"))
    assert known.matches(chain("xyzw")) == {"a": 3, "b": 2}
    assert known.matches(chain("x")) == {"a": 1, "b": 1}
    assert known.matches(chain("pz")) == {"c": 1}
    assert known.matches(chain("zx")) == known.matches([]) == {}


def test_a_backend_that_is_gone_is_forgotten() -> None:
    known = Prefixes()
    known.saw("a", chain("xyz"))
    known.saw("b", chain("xy"))
    known.keep(["b", "c"])
    assert known.matches(chain("xyz")) == {"b": 2}
    known.keep(["a", "b"])
    assert known.matches(chain("xyz")) == {"b": 2}, "it came back with nothing"


def test_the_end_of_what_is_longest_unused_goes_first() -> None:
    known = Prefixes(6)
    known.saw("a", chain("abc"))
    known.saw("a", chain("xyz"))
    known.saw("a", chain("abc"))
    known.saw("a", chain("p"))
    assert len(known) == 6
    assert known.matches(chain("xyz")) == {"a": 2}
    assert known.matches(chain("abc")) == {"a": 3}


words = st.text(alphabet="abc", min_size=1, max_size=5)


@given(st.lists(st.tuples(st.sampled_from("pqr"), words), max_size=30), words, st.integers(3, 20))
def test_it_is_bounded_and_says_nothing_that_was_not_seen(
    sent: list[tuple[str, str]], asked: str, most: int
) -> None:
    known = Prefixes(most)
    for backend, word in sent:
        known.saw(backend, chain(word))
        assert len(known) <= most
    for backend, depth in known.matches(chain(asked)).items():
        assert any(b == backend and w.startswith(asked[:depth]) for b, w in sent)
    for seen in known._seen.values():
        for each in seen:
            assert all(each[:n] in seen for n in range(1, len(each))), "a hole in a beginning"


@given(st.lists(st.tuples(st.sampled_from("pqr"), words), max_size=30), words)
def test_without_a_bound_each_backend_has_the_longest_it_ever_got(
    sent: list[tuple[str, str]], asked: str
) -> None:
    known = Prefixes()
    for backend, word in sent:
        known.saw(backend, chain(word))
    for backend in "pqr":
        starts = [n for n in range(1, len(asked) + 1)
                  if any(b == backend and w.startswith(asked[:n]) for b, w in sent)]  # fmt: skip
        assert known.matches(chain(asked)).get(backend, 0) == max(starts, default=0)


def route(known: Prefixes, rooms: dict[str, Place], *words: str) -> list[str]:
    places = Router().places(rooms, len(words))
    return follow(known, rooms, places, [chain(w) for w in words])


def test_a_job_follows_its_beginning_while_load_is_even() -> None:
    known = Prefixes()
    known.saw("b", chain("xyz"))
    even = {name: Place(3, 4) for name in "abc"}
    assert route(known, even, "xyzw") == ["b"]
    assert route(known, even, "q", "xq", "r") == ["a", "b", "c"]


def test_it_follows_no_backend_that_has_too_much_in_flight() -> None:
    known = Prefixes()
    known.saw("b", chain("xyz"))
    # Of 4, 4 and n the mean times 1.25 and one is at least n up to 7.
    for n, goes in ((7, "b"), (8, "a")):
        rooms = {"a": Place(9, 4), "b": Place(9, n), "c": Place(9, 4)}
        assert route(known, rooms, "xyz") == [goes]
        known.keep(["b"])


def test_the_longest_match_goes_before_the_fewest_in_flight() -> None:
    known = Prefixes()
    known.saw("a", chain("xyzw"))
    known.saw("b", chain("xy"))
    assert route(known, {"a": Place(9, 5), "b": Place(9, 3), "c": Place(9, 3)}, "xyzw") == ["a"]


def test_where_the_longest_match_has_too_much_in_flight_the_next_has_its_turn() -> None:
    known = Prefixes()
    known.saw("a", chain("xyzw"))
    known.saw("b", chain("xyz"))
    rooms = {"a": Place(9, 20), "b": Place(9, 3), "c": Place(9, 2)}
    assert route(known, rooms, "xyzw") == ["b"]


def test_a_backend_without_room_gets_nothing() -> None:
    known = Prefixes()
    known.saw("b", chain("xyz"))
    assert route(known, {"a": Place(1, 5), "b": Place(0, 0)}, "xyz") == ["a"]
    known.keep(["b"])
    assert route(known, {"a": Place(3, 0), "b": Place(1, 0)}, "xyzp", "xyzq") == ["b", "a"]


def test_those_that_are_out_of_use_do_not_count_for_the_mean() -> None:
    known = Prefixes()
    known.saw("a", chain("xyz"))
    rooms = {"a": Place(9, 6), "b": Place(9, 4), **{n: Place(0, 0) for n in "cdefgh"}}
    assert route(known, rooms, "xyz") == ["a"]


def test_what_all_have_draws_nobody() -> None:
    known = Prefixes()
    for name in "abc":
        known.saw(name, chain("system"))
    rooms = {"a": Place(9, 2), "b": Place(9, 1), "c": Place(9, 2)}
    assert route(known, rooms, "systemx") == ["b"]


def test_of_equal_matches_the_one_with_fewer_in_flight() -> None:
    known = Prefixes()
    known.saw("a", chain("xyz"))
    known.saw("b", chain("xyz"))
    assert route(known, {"a": Place(9, 3), "b": Place(9, 2), "c": Place(9, 0)}, "xyz") == ["b"]


def test_a_match_of_less_than_six_tenths_draws_nobody() -> None:
    rooms = {"a": Place(9, 1), "b": Place(9, 0)}
    for more, goes in (("pq", "a"), ("pqr", "b")):
        known = Prefixes()
        known.saw("a", chain("xyz"))
        assert route(known, rooms, "xyz" + more) == [goes]


def test_those_with_equal_matches_take_turns() -> None:
    known, router, idle = Prefixes(), Router(), {name: Place(3, 0) for name in "abc"}
    went = []
    for name in "abc":
        known.saw(name, chain("system"))
    for _ in range(6):
        [name] = follow(known, idle, router.places(idle, 1), [chain("system")])
        router.sent(name)
        went.append(name)
    assert went == [*"abc", *"abc"]


def test_jobs_popped_at_once_follow_each_other() -> None:
    rooms = {name: Place(3, 0) for name in "ab"}
    assert route(Prefixes(), rooms, "xyz", "xyzw", "p") == ["a", "a", "b"]


def test_without_beginnings_places_stay_as_they_were() -> None:
    rooms = {"a": Place(3, 1), "b": Place(3, 0), "c": Place(1, 0)}
    places = Router().places(rooms, 6)
    assert follow(Prefixes(), rooms, places, [()] * 6) == places
    assert follow(Prefixes(), rooms, places, [()] * 2) == places[:2]


@given(
    rooms=st.dictionaries(
        st.sampled_from("abcde"), st.builds(Place, st.integers(-1, 5), st.integers(0, 9))
    ),
    sent=st.lists(st.tuples(st.sampled_from("abcdef"), words), max_size=20),
    jobs=st.lists(words | st.just(""), max_size=20),
)
def test_no_backend_gets_more_than_it_has_room_for(
    rooms: dict[str, Place], sent: list[tuple[str, str]], jobs: list[str]
) -> None:
    known = Prefixes(40)
    for backend, word in sent:
        known.saw(backend, chain(word))
    places = Router().places(rooms, len(jobs))
    given_out: Counter[str] = Counter()
    for n, name in enumerate(follow(known, rooms, places, [chain(w) for w in jobs])):
        open_ = [x for x, p in rooms.items() if p.room > given_out[x]]
        assert name in open_
        load = {x: p.inflight + given_out[x] for x, p in rooms.items()}
        serving = [load[x] for x in load if load[x] or rooms[x].room > given_out[x]]
        within = load[name] <= LOAD_FACTOR * sum(serving) / len(serving) + LOAD_SPARE
        assert within or load[name] == min(load[x] for x in open_)
        assert jobs[n] or load[name] == min(load[x] for x in open_)
        given_out[name] += 1
    assert given_out.total() == len(places)
