"""Jobs follow the beginnings of their prompts from backend to backend, by the real dispatcher."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from common.errors import BrokerUncertain
from common.keys import ModelKeys
from common.outcomes import Outcome
from common.settings import ModelSettings, Settings
from common.wire import PREFIX_HASH_BYTES, decode_meta
from dispatcher.loop import ModelLoop
from sim.settings import EngineSettings
from tests.flow.world import Asked, Hosts, World, world
from tests.support.asgi import Exchange
from tests.support.gateway import MODEL, site
from tests.support.wait import pass_time, wait_until

CHAT = "/v1/chat/completions"
KEYS = ModelKeys("m1")
ENGINES = {
    h: EngineSettings(model="m1", max_num_seqs=16, step_ms=50, per_seq_us=0.0, max_model_len=65_536)
    for h in ("e1", "e2", "e3")
}


def host(w: World, asked: Asked) -> str:
    """Whose engine got the job; of several the last."""
    [*_, name] = [
        h for h, e in w.engines.items() for r in e.log if r.headers.get("x-request-id") == asked.job
    ]
    return name


def turn(talk: str, n: int) -> str:
    """What a conversation has said by its nth turn; the first blocks of each are its own."""
    return talk * 2_500 + "".join(f"{talk}{m}" * 500 for m in range(n))


def loop_of(w: World) -> ModelLoop:
    leader = w.leader()
    assert leader is not None
    return leader._loops["m1"]


@asynccontextmanager
async def checked(monkeypatch: pytest.MonkeyPatch, **model: object) -> AsyncIterator[World]:
    """A world in which each engine's record says, whenever it gets a job, that it has it."""
    wrong: list[str] = []
    send = Hosts.handle_async_request
    async with world(monkeypatch, ENGINES, model=model) as w:

        async def watched(self: Hosts, request: httpx.Request) -> httpx.Response:
            if request.method == "POST":
                record = KEYS.record(request.headers["x-request-id"])
                known = await w.gateways[0][0].broker.command("HGET", record, "backend")
                if known.decode() != f"http://{request.url.host}":
                    wrong.append(f"{request.url.host} got what {known.decode()} has")
            return await send(self, request)

        monkeypatch.setattr(Hosts, "handle_async_request", watched)
        yield w
        assert wrong == []


@pytest.mark.looptime
async def test_conversations_stay_where_they_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked(monkeypatch) as w:
        went: dict[str, list[str]] = {talk: [] for talk in "abcdef"}
        for n in range(5):
            for talk in sorted(went, reverse=n % 2 == 0):
                asked = await w.ask(talk, output=5, text=turn(talk, n))
                await w.answers(asked)
                went[talk].append(host(w, asked))
        assert all(len(set(hosts)) == 1 for hosts in went.values()), went
        assert set(Counter(hosts[0] for hosts in went.values()).values()) == {2}


@pytest.mark.looptime
async def test_switched_off_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked(monkeypatch, prefix_affinity=False) as w:
        hosts = []
        for n in range(6):
            asked = await w.ask("a", output=5, text=turn("a", n))
            await w.answers(asked)
            hosts.append(host(w, asked))
        assert sorted(hosts) == ["e1", "e1", "e2", "e2", "e3", "e3"]


@pytest.mark.looptime
async def test_a_crowd_that_shares_a_beginning_is_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked(monkeypatch, reserved_slots=0) as w:
        first = await w.ask("a", output=5, text=turn("a", 0))
        await w.answers(first)
        crowd = [await w.ask(f"u{n}", output=100, text=turn("a", 0)) for n in range(24)]
        await w.answers(*crowd)
        hosts = Counter(host(w, a) for a in crowd)
        assert len(hosts) == 3 and max(hosts.values()) <= 1.25 * 24 / 3 + 2, hosts


@pytest.mark.looptime
async def test_it_moves_when_its_backend_is_overloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked(monkeypatch, reserved_slots=0) as w:
        first = await w.ask("a", output=5, text=turn("a", 0))
        await w.answers(first)
        home = host(w, first)
        [backend] = [b for b in loop_of(w).backends if b.url == f"http://{home}"]
        now = asyncio.get_running_loop().time()
        for n in range(6):  # of jobs that another dispatcher sent there
            backend.load.sent(now, f"other{n}", "standard", streams=True)
            backend.load.started(now, f"other{n}")
        then = await w.ask("a", output=5, text=turn("a", 1))
        await w.answers(then)
        moved = host(w, then)
        assert moved != home
        for n in range(6):
            backend.ended(now, f"other{n}")
        last = await w.ask("a", output=5, text=turn("a", 2))
        await w.answers(last)
        assert host(w, last) == moved, "it has computed the most of it"


@pytest.mark.looptime
async def test_a_backend_that_was_away_has_computed_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked(monkeypatch) as w:
        first = await w.ask("a", output=5, text=turn("a", 0))
        await w.answers(first)
        home = host(w, first)
        [backend] = [b for b in loop_of(w).backends if b.url == f"http://{home}"]
        w.engines[home].kill()
        await wait_until(lambda: backend.reachable is False, timeout=20, what="it is missed")
        then = await w.ask("a", output=5, text=turn("a", 1))
        await w.answers(then)
        w.engines[home].revive()
        await wait_until(lambda: backend.reachable, timeout=20, what="it is back")
        last = await w.ask("a", output=5, text=turn("a", 2))
        await w.answers(last)
        assert host(w, then) == host(w, last) != home


@pytest.mark.looptime
async def test_a_move_that_may_not_be_written_down_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with checked(monkeypatch) as w:
        await w.answers(await w.ask("a", output=5, text=turn("a", 0)))
        queue = loop_of(w).queue
        renew, failed = queue.renew, []

        async def broken(*args: object, **more: object) -> object:
            if not failed:
                failed.append(args)
                raise BrokerUncertain("no answer")
            return await renew(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(queue, "renew", broken)
        asked = await w.ask("a", output=5, text=turn("a", 1))
        await w.answers(asked)
        assert failed and asked.outcome is Outcome.FINISHED
        runs = [r for e in w.engines.values() for r in e.log
                if r.headers.get("x-request-id") == asked.job]  # fmt: skip
        assert len(runs) == 1


@pytest.mark.looptime
async def test_jobs_popped_as_the_leader_ends_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with checked(monkeypatch) as w:
        await w.answers(await w.ask("a", output=5, text=turn("a", 0)))
        queue = loop_of(w).queue
        renew, asked_for, go_on = queue.renew, asyncio.Event(), asyncio.Event()

        async def slow(*args: object, **more: object) -> object:
            asked_for.set()
            await go_on.wait()
            return await renew(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(queue, "renew", slow)
        asked = await w.ask("a", output=5, text=turn("a", 1))
        await asked_for.wait()
        process, _ = w.dispatchers.pop()
        for task in process.tasks[1:]:  # all but its way to Redis
            task.cancel()
        await pass_time(0.1)
        go_on.set()
        await asyncio.gather(*process.tasks[1:], return_exceptions=True)
        state = await w.gateways[0][0].broker.command("HGET", KEYS.record(asked.job), "state")
        assert state == b"waiting"
        await w.add_dispatcher("d2")
        await w.answers(asked)
        assert asked.outcome is Outcome.FINISHED
        process.tasks[0].cancel()


@pytest.mark.parametrize(
    ("backends", "on", "ahead", "told"),
    [(2, True, 0, True), (1, True, 0, False), (1, True, 1, True), (2, False, 1, False)],
)
async def test_a_gateway_tells_beginnings_where_there_is_a_choice(
    backends: int, on: bool, ahead: int, told: bool
) -> None:
    settings = Settings(models={MODEL: ModelSettings(prefix_affinity=on, prefix_lookahead=ahead)})
    messages = [{"role": "user", "content": "x" * 5_000}]
    sent = json.dumps({"model": MODEL, "messages": messages}).encode()
    async with site(settings, backends=backends) as s, Exchange(s.app, "POST", CHAT, sent) as e:
        run = await s.dispatcher.pop()
        prefix = decode_meta(run.lease.meta).prefix
        assert len(prefix) == (4 * PREFIX_HASH_BYTES if told else 0)
        await run.answer(b'{"ok":1}')
        await e.until_over()
