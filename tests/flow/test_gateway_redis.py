"""What becomes of a job when Redis fails, loses it, or takes its gateway for dead, and when its run
ends before it does."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import fakeredis
import pytest

from common.errors import BrokerDown, BrokerError, BrokerRefused, BrokerUncertain
from common.links import Argument, EmbeddedLink, Reply
from common.outcomes import Outcome
from common.settings import GatewaySettings, Settings
from common.wire import End
from tests.support.asgi import Exchange, ask
from tests.support.gateway import MODEL, Run, Site, site

CHAT = "/v1/chat/completions"
A, DONE = b'data: {"a":1}\n\n', b"data: [DONE]\n\n"


def body(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
                      ).encode()  # fmt: skip


STREAM = body(stream=True)


# --- Redis fails


class FlakyLink(EmbeddedLink):
    """A link whose next enqueues fail: their answer is lost, or they never arrive."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        super().__init__(server)
        self.sha = ""
        self.faults: list[type[BrokerError]] = []
        self.enqueues = 0

    async def execute(self, args: Sequence[Argument]) -> Reply:
        if args[:2] != ("EVALSHA", self.sha):
            return await super().execute(args)
        self.enqueues += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault in (BrokerDown, BrokerRefused):
            raise fault("planted")
        answer = await super().execute(args)
        if fault is not None:
            raise fault("planted")
        return answer


async def flaky(s: Site, *faults: type[BrokerError]) -> FlakyLink:
    """Put a flaky link in place of the gateway's own."""
    link = FlakyLink(s.server)
    await link.connect()
    link.sha, link.faults = s.broker.scripts["enqueue"].sha, list(faults)
    s.broker.link = link
    return link


@pytest.mark.looptime
@pytest.mark.parametrize("faults", [[BrokerUncertain], [BrokerUncertain, BrokerDown],
                                    [BrokerUncertain, BrokerUncertain]])  # fmt: skip
async def test_an_uncertain_enqueue_is_repeated(faults: list[type[BrokerError]]) -> None:
    async with site() as s:
        link = await flaky(s, *faults)
        async with Exchange(s.app, "POST", CHAT, body()) as e:
            await (await s.dispatcher.pop()).answer(b"{}")
            assert (await e.until_over()).status == 200
        assert link.enqueues == len(faults) + 1
        await s.at_rest()


async def test_an_enqueue_that_stays_uncertain_is_cancelled() -> None:
    async with site() as s:
        await flaky(s, *[BrokerUncertain] * 3)
        e = await ask(s.app, "POST", CHAT, body())
        assert e.status == 503 and 1 <= int(e.headers["retry-after"]) <= 60
        await s.one_waits(0)
        await s.at_rest()


@pytest.mark.parametrize("fault", [BrokerDown, BrokerRefused])
async def test_an_enqueue_that_did_not_run_is_refused_at_once(fault: type[BrokerError]) -> None:
    async with site() as s:
        link = await flaky(s, fault)
        assert (await ask(s.app, "POST", CHAT, body())).status == 503
        assert link.enqueues == 1
        await s.at_rest()


class HeldLink(FlakyLink):
    """A link whose enqueues are not answered until `gate` is open."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        super().__init__(server)
        self.gate = asyncio.Event()

    async def execute(self, args: Sequence[Argument]) -> Reply:
        answer = await super().execute(args)
        if args[:2] == ("EVALSHA", self.sha):
            await self.gate.wait()
        return answer


async def test_large_bodies_go_to_redis_one_at_a_time() -> None:
    large = body(user="x" * (2 << 20))
    async with site() as s:
        link = HeldLink(s.server)
        await link.connect()
        link.sha = s.broker.scripts["enqueue"].sha
        s.broker.link = link
        async with (
            Exchange(s.app, "POST", CHAT, large),
            Exchange(s.app, "POST", CHAT, large),
            Exchange(s.app, "POST", CHAT, body()),
        ):
            await s.one_waits(2)
            assert link.enqueues == 2, "the first large one, and the small one beside it"
            link.gate.set()
            await s.one_waits(3)


async def test_a_redis_that_lost_everything_is_told_again() -> None:
    async with (
        site() as s,
        Exchange(s.app, "POST", CHAT, body(user="a", seed=1)) as first,
        Exchange(s.app, "POST", CHAT, body(user="a", seed=2)) as second,
    ):
        await s.one_waits(2)
        running = await s.dispatcher.pop()
        await running.start(running.head(200, False), running.data(b"{"))
        lane = s.dispatcher.queue.keys.lane("standard", "a")
        before = await s.broker.command("ZRANGE", lane, 0, -1, "WITHSCORES")
        await s.broker.command("FLUSHALL")
        await s.broker.link.close()
        await s.one_waits(1)
        assert await s.broker.command("ZRANGE", lane, 0, -1, "WITHSCORES") == before
        run = await s.dispatcher.pop()
        assert run.lease.job != running.lease.job
        await run.answer(b'{"ok":1}')
        waiting = second if running.body["seed"] == 1 else first
        await waiting.until_over()
        assert waiting.body == b'{"ok":1}'
        started = first if waiting is second else second
        await running.send(running.data(b"}"), End(running.lease.job, running.lease.attempt, 3,
                                                   Outcome.FINISHED, "", None))  # fmt: skip
        await started.until_over()
        assert started.body == b"{}"


# --- runs that end, jobs that go on


async def as_dead(s: Site, run: Run) -> None:
    """The leader takes this gateway for dead: its waiting job is cancelled and told so."""
    lease = run.lease
    end = End(lease.job, 0, -1, Outcome.GATEWAY_DEAD, "", None)
    word, _ = await s.dispatcher.queue.cancel(
        lease.job, lease.cls, lease.user, lease.replica, Outcome.GATEWAY_DEAD,
        frames=s.dispatcher.batch([end]),
    )  # fmt: skip
    assert word == "cancelled"


async def test_a_gateway_taken_for_dead_queues_its_jobs_again() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body()) as e:
        first = await s.dispatcher.pop()
        again = await s.dispatcher.queue.requeue(first.lease, s.dispatcher.name, count_try=False)
        assert again == "requeued"
        await as_dead(s, first)
        second = await s.dispatcher.pop()
        assert second.lease.job == first.lease.job and second.lease.arrival == first.lease.arrival
        assert second.lease.attempt > first.lease.attempt
        await second.answer(b'{"ok":1}')
        await e.until_over()
        assert (e.status, e.body) == (200, b'{"ok":1}')
        await s.at_rest()


async def orphan(s: Site, run: Run) -> None:
    """The lease of a started run ends: the leader settles it as an orphan."""
    lease = run.lease
    end = End(lease.job, lease.attempt + 1, -1, Outcome.ORPHANED, "", None)
    word = await s.dispatcher.queue.settle(
        lease, s.dispatcher.name, Outcome.ORPHANED, s.dispatcher.batch([end]), heir=True,
        now_ms=await s.broker.now_ms() + 60_000,
    )  # fmt: skip
    assert word == "settled"
    s.dispatcher.runs.remove(run)


async def test_an_orphan_of_which_nothing_was_seen_runs_again() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body()) as e:
        first = await s.dispatcher.pop()
        await first.start(first.head(200, False), first.data(b'{"half'))
        await orphan(s, first)
        await s.one_waits()
        lease = first.lease  # such a frame is repeated, and old ones may be late
        end = End(lease.job, lease.attempt + 1, -1, Outcome.ORPHANED, "", None)
        await first.send(first.data(b'":1}'))
        for _ in range(6):
            await first.send(end)
            await s.one_waits()
        second = await s.dispatcher.pop()
        assert second.lease.job == first.lease.job and second.lease.attempt > first.lease.attempt
        await second.answer(b'{"ok":1}')
        await e.until_over()
        assert (e.status, e.body) == (200, b'{"ok":1}')


async def test_an_orphan_of_which_a_part_was_seen_ends_with_an_error() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, STREAM) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(), run.data(A))
        await e.until(A)
        await orphan(s, run)
        await e.until_over()
        assert e.body.startswith(A) and b"answer_interrupted" in e.body and e.complete
        await s.at_rest()


async def test_a_job_that_is_queued_again_keeps_its_deadline() -> None:
    settings = Settings(gateway=GatewaySettings(wait_standard_s=1))
    async with site(settings) as s, Exchange(s.app, "POST", CHAT, body()) as e:
        run = await s.dispatcher.pop()
        await run.start(run.head(200, False), run.data(b"{"))
        await orphan(s, run)
        await e.until_over(10)
        assert e.status == 504
        await s.at_rest()


async def test_a_job_is_not_queued_again_for_ever() -> None:
    async with site() as s, Exchange(s.app, "POST", CHAT, body()) as e:
        for _ in range(3):
            run = await s.dispatcher.pop()
            await run.start(run.head(200, False), run.data(b"{"))
            await orphan(s, run)
        await e.until_over()
        assert e.status == 502
        await s.at_rest()
