"""The engine model: its promises under random load, and its exact timing."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.engine import Engine
from sim.events import EngineRequest, Event, Finished, Gauges, TokenEvent
from sim.settings import EngineSettings

INF = float("inf")


def plain(**changes: object) -> EngineSettings:
    """Round numbers: a step lasts 10 ms, a prompt token 1 ms."""
    values: dict[str, object] = {
        "max_num_seqs": 2,
        "step_ms": 10.0,
        "per_seq_us": 0.0,
        "prefill_tokens_per_s": 1_000.0,
        "prefill_chunk_tokens": 100,
        "kv_tokens": 1_000,
        "max_model_len": 1_000,
        **changes,
    }
    return EngineSettings(**values)  # type: ignore[arg-type]


def ask(prompt: int = 10, output: int = 3, priority: int = 0) -> EngineRequest:
    return EngineRequest(prompt_tokens=prompt, output_tokens=output, priority=priority)


def times_of(events: Iterable[Event], request_id: int) -> list[float]:
    return [
        pytest.approx(event.at)  # type: ignore[misc]
        for event in events
        if isinstance(event, TokenEvent) and event.request_id == request_id
    ]


def first_tokens(events: Iterable[Event]) -> list[int]:
    return [e.request_id for e in events if isinstance(e, TokenEvent) and e.index == 0]


# --- timing ---


def test_prefill_then_one_token_a_step() -> None:
    engine = Engine(plain())
    one = engine.submit(1.0, ask(prompt=20, output=3))
    assert (engine.running(), engine.waiting()) == (1, 0)
    assert engine.next_event(1.0) == pytest.approx(1.030)
    events = engine.advance(INF)
    # 10 ms + 20 ms of prefill give the first token, each further one costs a step.
    assert times_of(events, one) == [1.030, 1.040, 1.050]
    assert isinstance(events[-1], Finished) and events[-1].tokens == 3
    assert engine.next_event(2.0) is None


def test_each_sequence_lengthens_the_step() -> None:
    engine = Engine(plain(per_seq_us=1_000.0, prefill_tokens_per_s=1e9))
    one = engine.submit(0.0, ask(prompt=1, output=4))
    engine.submit(0.0, ask(prompt=1, output=1))
    assert times_of(engine.advance(INF), one) == [0.011, 0.023, 0.034, 0.045]


def test_a_long_prompt_is_cut_into_chunks_while_others_decode() -> None:
    engine = Engine(plain(prefill_chunk_tokens=50))
    short = engine.submit(0.0, ask(prompt=10, output=5))
    long = engine.submit(0.001, ask(prompt=120, output=1))
    events = engine.advance(INF)
    # The short one decodes beside each chunk of 50, 50 and 20 tokens.
    assert times_of(events, short) == [0.020, 0.080, 0.140, 0.170, 0.180]
    assert times_of(events, long) == [0.170]


def test_late_calls_lose_no_time() -> None:
    engine = Engine(plain())
    one = engine.submit(0.0, ask(prompt=10, output=2))
    two = engine.submit(5.0, ask(prompt=10, output=1))
    assert engine.next_event(5.0) == 5.0
    events = engine.advance(5.0) + engine.advance(6.0)
    assert times_of(events, one) == [0.020, 0.030]
    assert times_of(events, two) == [5.020]


def test_embeddings_take_one_step_and_no_tokens() -> None:
    engine = Engine(plain())
    engine.submit(0.0, ask(prompt=500, output=0))
    (event,) = engine.advance(INF)
    assert isinstance(event, Finished) and (event.at, event.tokens) == (pytest.approx(0.510), 0)


def test_time_may_not_run_backwards() -> None:
    engine = Engine(plain())
    engine.submit(2.0, ask())
    with pytest.raises(ValueError, match="backwards"):
        engine.advance(1.0)


@pytest.mark.parametrize("request_", [ask(prompt=0), ask(prompt=900, output=101), ask(output=-1)])
def test_impossible_requests_are_refused(request_: EngineRequest) -> None:
    with pytest.raises(ValueError):
        Engine(plain()).submit(0.0, request_)


# --- order ---


def test_priority_mode_starts_the_lowest_number_first() -> None:
    engine = Engine(plain(max_num_seqs=1, priority_mode=True))
    ids = [engine.submit(0.0, ask(priority=p)) for p in (0, 5, 5, -1)]
    assert first_tokens(engine.advance(INF)) == [ids[0], ids[3], ids[1], ids[2]]


def test_fcfs_ignores_priority() -> None:
    engine = Engine(plain(max_num_seqs=1))
    ids = [engine.submit(0.0, ask(priority=p)) for p in (0, 5, 5, -1)]
    assert first_tokens(engine.advance(INF)) == ids


def test_a_full_cache_preempts_the_newest_and_it_finishes_later() -> None:
    engine = Engine(plain(kv_tokens=60, max_model_len=60))
    old = engine.submit(0.0, ask(prompt=20, output=30))
    new = engine.submit(0.0, ask(prompt=20, output=30))
    events = engine.advance(INF)
    assert engine.preemptions() == 1
    done = [event.request_id for event in events if isinstance(event, Finished)]
    assert done == [old, new]
    assert [e.index for e in events if isinstance(e, TokenEvent) and e.request_id == new] == [
        *range(30)
    ]


def test_priority_mode_preempts_the_least_urgent() -> None:
    engine = Engine(plain(kv_tokens=60, max_model_len=60, priority_mode=True))
    lazy = engine.submit(0.0, ask(prompt=20, output=30, priority=9))
    urgent = engine.submit(0.0, ask(prompt=20, output=30, priority=1))
    done = [e.request_id for e in engine.advance(INF) if isinstance(e, Finished)]
    assert (engine.preemptions(), done) == (1, [urgent, lazy])


def test_a_step_that_preempts_admits_nobody() -> None:
    seen: list[Gauges] = []
    engine = Engine(plain(kv_tokens=60, max_model_len=60, priority_mode=True), seen.append)
    for now, prompt, output, priority in ((0.0, 20, 30, 1), (0.0, 20, 30, 9), (0.1, 5, 1, 5)):
        engine.submit(now, ask(prompt, output, priority))
    engine.advance(INF)
    at = next(i for i, gauges in enumerate(seen) if gauges.preemptions)
    assert [(g.running, g.waiting) for g in seen[at : at + 2]] == [(1, 2), (2, 1)]


# --- abort ---


def test_abort_frees_at_once_and_the_next_starts_at_the_boundary() -> None:
    engine = Engine(plain(max_num_seqs=1))
    one = engine.submit(0.0, ask(prompt=10, output=100))
    two = engine.submit(0.0, ask(prompt=10, output=1))
    three = engine.submit(0.0, ask())
    assert engine.abort(0.015, three)
    assert engine.waiting() == 1
    assert engine.abort(0.015, one)
    assert (engine.running(), engine.kv_usage()) == (0, 0.0)
    events = engine.advance(INF)
    assert [event.request_id for event in events] == [two, two]
    assert times_of(events, two) == [0.040]
    assert not engine.abort(INF, two)


def test_aborted_requests_leave_no_events_behind() -> None:
    engine = Engine(plain())
    one = engine.submit(0.0, ask(output=50))
    engine.abort(0.2, one)
    assert engine.advance(1.0) == []


# --- under random load ---

Op = tuple[str, int, int, int, float]
OPS: st.SearchStrategy[list[Op]] = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "submit", "abort", "wait"]),
        st.integers(1, 60),
        st.integers(0, 40),
        st.integers(-2, 2),
        st.sampled_from([0.0, 0.0, 0.001, 0.01, 0.05, 0.4]),
    ),
    max_size=50,
)


class _Checked:
    """An engine, all its events, and what an observer may never see."""

    def __init__(self, config: EngineSettings) -> None:
        self.engine = Engine(config, self._look)
        self.config = config
        self.requests: dict[int, EngineRequest] = {}
        self.aborted: set[int] = set()
        self.events: list[Event] = []
        self.peak = 0
        self.now = 0.0

    def _look(self, gauges: Gauges) -> None:
        assert 0 <= gauges.running <= self.config.max_num_seqs
        assert gauges.running + gauges.free_slots == self.config.max_num_seqs
        assert 0.0 <= gauges.kv_usage <= 1.0
        self.peak = max(self.peak, gauges.waiting)

    def play(self, ops: list[Op]) -> None:
        for verb, prompt, output, priority, pause in ops:
            self.now += pause
            if verb == "submit":
                request = ask(prompt, output, priority)
                self.requests[self.engine.submit(self.now, request)] = request
            elif verb == "abort" and self.requests:
                victim = list(self.requests)[prompt % len(self.requests)]
                if self.engine.abort(self.now, victim):
                    self.aborted.add(victim)
            else:
                self.events += self.engine.advance(self.now)
        self.events += self.engine.advance(INF)

    def tokens(self, request_id: int) -> list[int]:
        return [
            e.index for e in self.events if isinstance(e, TokenEvent) and e.request_id == request_id
        ]


@settings(max_examples=120, deadline=None)
@given(ops=OPS, slots=st.integers(1, 4), kv=st.sampled_from([100, 130, 1_000]), mode=st.booleans())
def test_every_request_gets_exactly_its_tokens(
    ops: list[Op], slots: int, kv: int, mode: bool
) -> None:
    checked = _Checked(
        plain(max_num_seqs=slots, kv_tokens=kv, max_model_len=100, priority_mode=mode,
              prefill_chunk_tokens=25)
    )  # fmt: skip
    checked.play(ops)
    engine = checked.engine
    finished = {e.request_id: e.tokens for e in checked.events if isinstance(e, Finished)}
    for request_id, request in checked.requests.items():
        if request_id in checked.aborted:
            assert request_id not in finished
            continue
        assert finished[request_id] == request.output_tokens
        assert checked.tokens(request_id) == [*range(request.output_tokens)]
    assert (engine.running(), engine.waiting(), engine.kv_usage()) == (0, 0, 0.0)
    assert engine.peak_waiting == checked.peak
    done = engine.stats.finished_length + engine.stats.finished_stop
    assert done == len(checked.requests) - len(checked.aborted)
    assert [e.at for e in checked.events] == sorted(e.at for e in checked.events)


@settings(max_examples=60, deadline=None)
@given(ops=OPS, slots=st.integers(1, 4))
def test_fcfs_starts_in_order_of_arrival(ops: list[Op], slots: int) -> None:
    checked = _Checked(plain(max_num_seqs=slots, prefill_chunk_tokens=10_000))
    checked.play([op for op in ops if op[2] > 0])
    started = first_tokens(checked.events)
    assert started == sorted(started)


@settings(max_examples=60, deadline=None)
@given(priorities=st.lists(st.integers(-3, 3), min_size=1, max_size=20))
def test_priority_order_is_total(priorities: list[int]) -> None:
    engine = Engine(plain(max_num_seqs=1, priority_mode=True))
    blocker = engine.submit(0.0, ask(output=1))
    ids = {engine.submit(0.0, ask(priority=p, output=1)): p for p in priorities}
    wanted = sorted(ids, key=lambda i: (ids[i], i))
    assert first_tokens(engine.advance(INF)) == [blocker, *wanted]


@settings(max_examples=50, deadline=None)
@given(ops=OPS)
def test_one_history_gives_one_result(ops: list[Op]) -> None:
    runs = [_Checked(plain(kv_tokens=100, max_model_len=100)) for _ in range(2)]
    for run in runs:
        run.play(ops)
    assert runs[0].events == runs[1].events


@settings(max_examples=50, deadline=None)
@given(ops=OPS)
def test_how_often_advance_is_called_changes_nothing(ops: list[Op]) -> None:
    eager, lazy = (_Checked(plain(kv_tokens=100, max_model_len=100)) for _ in range(2))
    submits = [op for op in ops if op[0] == "submit"]
    eager.play([step for op in submits for step in (op, ("wait", 1, 0, 0, 0.0))])
    lazy.play(submits)
    assert eager.events == lazy.events
