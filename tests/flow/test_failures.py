"""The failure rules: who inherits a job when its owner is gone. Virtual time, real code."""

import asyncio

import httpx
import pytest

from common.keys import ModelKeys
from common.outcomes import Outcome
from sim.settings import EngineSettings
from tests.flow.world import Asked, World, virtual_redis_clock, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

SLOW = EngineSettings(model="m1", max_num_seqs=4, step_ms=100, seed=1)


def texts(asked: Asked) -> list[bytes]:
    """The events of a stream."""
    return [e for e in asked.data.split(b"\n\n") if e]


def errors(asked: Asked) -> int:
    return sum(b'"error"' in e for e in texts(asked))


async def started(*asked: Asked) -> None:
    await wait_until(lambda: all(a.first_at is not None for a in asked), timeout=30, what="start")


async def at_rest(w: World, *, expiring: bool = False) -> None:
    """Nothing of any job is left in Redis; `expiring`: but what goes by itself."""
    permanent = ModelKeys("m1").permanent
    broker = w.gateways[0][0].broker

    async def clean() -> bool:
        left = [k for k in await w.keys() if not permanent(k)]
        return not [k for k in left if not expiring or await broker.command("TTL", k) < 0]

    await wait_until(clean, timeout=30, what="only permanent keys")


async def test_client_gone_while_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": SLOW}) as w:
        running = [await w.ask("a", output=20) for _ in range(7)]
        await started(*running[:4])
        queued = await w.ask("b", output=5)
        await pass_time(0.5)
        assert await w.cancel(queued) == "cancelled"
        await w.answers(*running)
        bodies = [r.body for r in w.engines["e1"].log]
        assert not any(queued.job.encode() in b for b in bodies)
        await at_rest(w)


async def test_client_gone_while_running_frees_the_engine_within_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": SLOW}) as w:
        asked = await w.ask("a", output=500)
        await started(asked)
        assert await w.cancel(asked) == "flagged"
        left = asyncio.get_running_loop().time()
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=2, what="abort")
        assert asyncio.get_running_loop().time() - left <= 1.1
        await at_rest(w)


async def test_gateway_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queued jobs are cancelled, its running ones aborted; the other gateway's go on."""
    async with world(monkeypatch, {"e1": SLOW}, gateways=2) as w:
        await pass_time(7.0)  # nobody is declared dead sooner after a takeover
        doomed = [await w.ask("a", output=2_000, gateway=1) for _ in range(9)]
        await started(*doomed[:4])
        other = await w.ask("b", output=5, gateway=0)
        await w.gateways[1][0].kill()
        for asked in doomed:
            assert asked.task is not None
            asked.task.cancel()
        await w.answers(other)
        assert other.outcome is Outcome.FINISHED
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=20, what="abort")
        await at_rest(w, expiring=True)


async def test_leader_loses_its_lease_and_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another pops within 3 s; what runs goes on where it is."""
    async with world(monkeypatch, {"e1": SLOW}, dispatchers=2) as w:
        leader = w.leader()
        assert leader is not None
        running = [await w.ask("a", output=100) for _ in range(4)]
        await started(*running)
        loop = leader._loops["m1"]

        async def unheard(*_: object, **__: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(loop.queue, "lead", unheard)
        lost = asyncio.get_running_loop().time()
        await wait_until(
            lambda: any(
                d is not leader and d._loops["m1"].election.leads for _, d in w.dispatchers
            ),
            timeout=5, what="another leader",
        )  # fmt: skip
        assert asyncio.get_running_loop().time() - lost <= 3.0
        late = await w.ask("b", output=5)
        await w.answers()
        assert {a.outcome for a in [*running, late]} == {Outcome.FINISHED}
        assert all(errors(a) == 0 for a in w.asked)
        await at_rest(w)


async def test_dispatcher_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued and unstarted jobs are answered by another; started ones end with the error."""
    async with world(monkeypatch, {"e1": SLOW}, dispatchers=2) as w:
        leader = w.leader()
        assert leader is not None
        asked = [await w.ask(f"u{n % 3}", output=60) for n in range(12)]
        await started(*asked[:1])
        await wait_until(lambda: w.engines["e1"].waiting() == 3, timeout=10, what="3 waiting")
        begun = {a.job for a in asked if a.first_at is not None}
        process = next(p for p, d in w.dispatchers if d is leader)
        await process.kill()
        w.dispatchers = [(p, d) for p, d in w.dispatchers if d is not leader]
        await w.answers()
        ends = {a.job: a.outcome for a in asked}
        assert {j for j, o in ends.items() if o is Outcome.ORPHANED} == begun
        assert {o for j, o in ends.items() if j not in begun} == {Outcome.FINISHED}
        await at_rest(w)


async def test_backend_dead_before_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend takes over; nobody notices, and the order holds."""
    engines = {"e1": SLOW, "e2": SLOW}
    async with world(monkeypatch, engines) as w:
        w.engines["e1"].kill()
        asked = [await w.ask(f"u{n % 2}", output=5, stream=n % 3 != 0) for n in range(20)]
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert {a.status for a in asked} == {200}
        await at_rest(w)


async def test_backend_dead_mid_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": SLOW, "e2": SLOW}) as w:
        asked = [await w.ask("a", output=50) for _ in range(8)]
        await started(*asked)
        before = {a.job: a.data for a in asked}
        w.engines["e1"].kill()
        await w.answers()
        failed = [a for a in asked if a.outcome is Outcome.FAILED]
        assert 0 < len(failed) < 8
        for a in failed:
            assert a.data.startswith(before[a.job])
            assert errors(a) == 1
            assert texts(a)[-1] == b"data: [DONE]"
        assert all(a.outcome is Outcome.FINISHED for a in asked if a not in failed)
        await at_rest(w)


async def test_a_silent_engine_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"first_byte_s": 3.0, "silence_s": 2.0}
    async with world(monkeypatch, {"e1": SLOW}, dispatcher=limits) as w:
        streaming = await w.ask("a", output=100)
        await started(streaming)
        whole = await w.ask("b", output=100, stream=False)
        await pass_time(0.5)
        w.engines["e1"].freeze()
        await w.answers()
        assert streaming.outcome is Outcome.TIMEOUT
        assert errors(streaming) == 1
        assert whole.outcome is Outcome.TIMEOUT
        assert whole.status == 0
        await at_rest(w)


async def test_redis_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams in flight go on and end whole; waiting jobs are answered afterwards."""
    async with world(monkeypatch, {"e1": SLOW}, dispatchers=2) as w:
        asked = [await w.ask(f"u{n}", output=80) for n in range(9)]
        await started(*asked[:4])
        w.server.connected = False
        await pass_time(5.0)
        w.server.connected = True
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert all(len(texts(a)) == 82 for a in asked), [len(texts(a)) for a in asked]
        await at_rest(w)


async def test_redis_loses_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatchers tell it again what they run: every stream that began ends whole."""
    async with world(monkeypatch, {"e1": SLOW}, dispatchers=2) as w:
        asked = [await w.ask(f"u{n}", output=80) for n in range(4)]
        await started(*asked)
        await w.gateways[0][0].broker.command("FLUSHALL")
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert all(errors(a) == 0 for a in asked)
        await at_rest(w)


async def test_a_lost_subscription_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": SLOW}) as w:
        asked = [await w.ask("a", output=60) for _ in range(4)]
        await started(*asked)
        for _ in range(3):
            w.gateways[0][1]._subscriber.drop()
            await pass_time(1.5)
        await w.answers()
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        assert all(len(texts(a)) == 62 for a in asked)
        await at_rest(w)


async def test_sigterm_of_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives up the lead at once, finishes what runs, and another goes on."""
    async with world(monkeypatch, {"e1": SLOW}, dispatchers=2) as w:
        leader = w.leader()
        assert leader is not None
        asked = [await w.ask(f"u{n}", output=30) for n in range(12)]
        await started(*asked[:4])
        stopping = asyncio.ensure_future(leader.stop())
        await wait_until(
            lambda: any(
                d is not leader and d._loops["m1"].election.leads for _, d in w.dispatchers
            ),
            timeout=3, what="another leader",
        )  # fmt: skip
        await w.answers()
        await stopping
        assert {a.outcome for a in asked} == {Outcome.FINISHED}
        await at_rest(w)


async def test_sigterm_hands_back_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": SLOW}, dispatchers=2, dispatcher={"drain_s": 2.0}) as w:
        leader = w.leader()
        assert leader is not None
        asked = [await w.ask(f"u{n}", output=300) for n in range(7)]
        await started(*asked[:4])
        begun = {a.job for a in asked if a.first_at is not None}
        await leader.stop()
        await w.answers()
        ends = {a.job: a.outcome for a in asked}
        assert {j for j, o in ends.items() if o is Outcome.FAILED} == begun
        assert {o for j, o in ends.items() if j not in begun} == {Outcome.FINISHED}
        await at_rest(w)


async def test_a_slow_reader_slows_only_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes nothing fills its window; the others do not notice."""
    fast = EngineSettings(model="m1", max_num_seqs=8, step_ms=1, seed=1, max_model_len=60_000)
    async with world(monkeypatch, {"e1": fast}) as w:
        _, follower = w.gateways[0]
        slow = await w.ask("slow", output=6_000)
        await started(slow)
        reply = follower._replies[slow.job]
        monkeypatch.setattr(reply, "taken", lambda n: None)
        others = [await w.ask("b", output=50) for _ in range(20)]
        await w.answers(*others)
        assert {a.outcome for a in others} == {Outcome.FINISHED}
        await pass_time(30.0)
        assert slow.end is None
        held = len(slow.data)
        assert held < (1 << 20) + (1 << 18)
        monkeypatch.undo()
        virtual_redis_clock(monkeypatch)
        reply.taken(held)
        await wait_until(lambda: len(slow.data) > held, timeout=5, what="the stream goes on")


async def test_a_cut_off_answer_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body without a length that ends early must not be handed on as if it were whole."""
    async with world(monkeypatch, {"e1": SLOW}) as w:
        whole = w.engines["e1"].handle_async_request

        async def cut(request: httpx.Request) -> httpx.Response:
            response = await whole(request)
            if request.url.path != "/v1/chat/completions":
                return response
            body = await response.aread()
            return httpx.Response(200, headers=response.headers, content=body[:-5])

        monkeypatch.setattr(w.engines["e1"], "handle_async_request", cut)
        asked = await w.ask("a", output=5, stream=False)
        await w.answers()
        assert asked.outcome is Outcome.FAILED
        assert asked.status == 502
        await at_rest(w)
