"""Events of a durable job, cut from its log and resumed at each."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from common.joblog import Entry
from common.outcomes import Outcome
from common.wire import Data, End, Head
from gateway.events import Cutter, Place, parse

SSE = [("content-type", "text/event-stream")]


class Log:
    """What a dispatcher writes, as entries."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.attempt = 0
        self.seq = 0

    def begin(self, attempt: int, *, stream: bool = True) -> None:
        self.attempt, self.seq = attempt, 0
        self.add([Head("j", attempt, 0, 200, SSE, stream)])

    def add(self, frames: Sequence[Head | Data | End], attempt: int | None = None) -> None:
        self.seq += len(frames)
        n = attempt or self.attempt
        self.entries.append(Entry(f"{n}-{self.seq}", n, list(frames)))

    def data(self, *pieces: bytes, more: Sequence[bool] = ()) -> None:
        flags = [*more, *[False] * len(pieces)]
        self.add([Data("j", self.attempt, 0, p, flags[i]) for i, p in enumerate(pieces)])

    def end(self, attempt: int | None = None) -> None:
        self.add([End("j", 0, 0, Outcome.FINISHED, "", None)], attempt)

    def read(self, place: Place | None = None) -> tuple[list[tuple[str, bytes]], Cutter]:
        """As a reader does from a place on."""
        cutter = Cutter(place)
        after = tuple(map(int, cutter.after.split("-"))) if cutter.after else (0, 0)
        found = []
        for entry in self.entries:
            if tuple(map(int, entry.id.split("-"))) > after:
                found += [(e.id, e.data) for e in cutter.take(entry)]
        return found, cutter


def test_each_event_has_an_id_of_its_own_and_is_resumed_at() -> None:
    """Events of all sizes, cut into frames and entries in any way."""
    rng = random.Random(7)
    for _ in range(50):
        log, sent = Log(), list[bytes]()
        for attempt in range(1, rng.randint(2, 3)):
            log.begin(attempt * 1_000)
            for n in range(rng.randint(1, 12)):
                event = b"event: e\ndata: %d-%d %s\n\n" % (attempt, n, b"x" * rng.randint(0, 9))
                sent.append(event)
                inside = (rng.randrange(len(event)) for _ in range(rng.randint(0, 3)))
                cuts = sorted({0, len(event), *inside})
                pieces = [event[a:b] for a, b in pairwise(cuts)]
                more = [True] * (len(pieces) - 1) + [False]
                if rng.random() < 0.5:
                    log.data(*pieces, more=more)
                else:  # an event over several entries
                    for piece, goes_on in zip(pieces, more, strict=True):
                        log.data(piece, more=[goes_on])
            if rng.random() < 0.3:
                log.data(b"data: a\n\ndata: b\n\n")
                sent += [b"data: a\n\n", b"data: b\n\n"]
        log.end()
        whole, cutter = log.read()
        assert cutter.end is not None and len({id for id, _ in whole}) == len(whole)
        events = [data for _, data in whole if not data.startswith(b"event: restart")]
        assert events == sent
        for at, (id, _) in enumerate(whole):
            assert log.read(parse(id))[0] == whole[at + 1 :]


def test_what_is_held_back_is_less_than_an_event() -> None:
    log = Log()
    log.begin(1)
    log.data(b"data: a\n\ndata: b")
    found, cutter = log.read()
    assert [d for _, d in found] == [b"data: a\n\n"] and cutter.end is None
    log.end()
    assert log.read()[0] == found, "half an event is none"


def test_a_log_whose_end_was_written_again_in_other_entries() -> None:
    log, again = Log(), Log()
    for one in (log, again):
        one.begin(1)
    events = [b"data: %d\n\n" % n for n in range(6)]
    log.data(*events)
    for event in events:
        again.data(event)
    for at, (id, _) in enumerate(log.read()[0]):
        assert [data for _, data in again.read(parse(id))[0]] == events[at + 1 :]


def test_an_attempt_that_broke_off_within_an_event_leaves_nothing() -> None:
    log = Log()
    log.begin(1)
    log.data(b"data: a\n\n", b"data: b", more=[False, True])
    log.begin(2)
    log.data(b"data: c\n\n")
    found = [data for _, data in log.read()[0]]
    assert found[-1] == b"data: c\n\n" and found[0] == b"data: a\n\n" and len(found) == 3


def test_a_line_end_that_is_cut_in_two() -> None:
    log = Log()
    log.begin(1)
    log.data(b"data: a\n", more=[True])
    log.data(b"\n")
    log.data(b"data: b\n\n")
    whole, _ = log.read()
    assert [d for _, d in whole] == [b"data: a\n\n", b"data: b\n\n"]
    for at, (id, _) in enumerate(whole):
        assert log.read(parse(id))[0] == whole[at + 1 :]


def test_an_end_of_another_hand_is_no_restart() -> None:
    log = Log()
    log.begin(1_000)
    log.data(b"data: a\n\n")
    log.end(2_000)
    whole, cutter = log.read()
    assert len(whole) == 1 and cutter.end is not None and cutter.last_id() == "2000-3.end"


def test_a_body_is_kept_until_its_end() -> None:
    log = Log()
    log.begin(5, stream=False)
    log.data(b'{"a":', b"1}")
    log.end()
    found, cutter = log.read()
    assert found == [] and cutter.body == b'{"a":1}' and not cutter.stream
    id = cutter.next_id()
    assert id == "5-0.1"
    found, again = log.read(parse(id))
    assert again.body == b'{"a":1}' and again.has_result() and not cutter.has_result()


@pytest.mark.parametrize(
    "id", ["", "1", "1-1", "0-1.1", "1-1.1 ", "1-1.1\n", "+1-1.1", "1-1.END", "1-1.-1", "١-1.1"]
)
def test_what_is_no_id(id: str) -> None:
    assert parse(id) is None


def test_places_beyond_the_log() -> None:
    last = Entry("7-5", 7, [])
    for id, beyond in [("7-5.0", False), ("7-5.end", False), ("7-4.3", False), ("7-5.1", True),
                       ("8-0.0", True), ("7-6.0", True), ("6-9.9", False)]:  # fmt: skip
        place = parse(id)
        assert place is not None and place.beyond(last) is beyond, id
