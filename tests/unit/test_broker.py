"""The way to Redis: nobody gets another's reply, and every kind of loss ends within its time."""

import asyncio
import contextlib
import functools
import random
from collections.abc import AsyncIterator, Iterator

import fakeredis
import pytest

from common.broker import Broker, Subscriber, open_link
from common.errors import BrokerDown, BrokerError, BrokerRefused, BrokerUncertain, ConfigError
from common.links import RedisLink
from common.queue import Queue
from tests.support.redis_server import RedisServer, free_port
from tests.support.wait import wait_until

TIMEOUT_S = 0.3
SLACK_S = 2.0
"""Beyond its limit for a slow machine; the limits themselves are far above what is usual."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """A Redis that this test may pause, stop and demote."""
    with RedisServer() as running:
        yield running


@contextlib.asynccontextmanager
async def running(broker: Broker) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(broker.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def own(server: RedisServer) -> AsyncIterator[Broker]:
    """A broker on the test's own Redis, with a short time-out."""
    broker = Broker(open_link(server.url, timeout_s=TIMEOUT_S))
    async with running(broker) as task, asyncio.timeout(20):
        await wait_until(broker.up.is_set)
        yield broker
        assert not task.done(), "the broker gave up"


async def usable(broker: Broker) -> bool:
    try:
        return bool(await broker.command("ECHO", "x") == b"x")
    except BrokerError:
        return False


async def direct(server: RedisServer, *words: str) -> bytes:
    """One command on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(" ".join(words).encode() + b"\r\n")
        return await reader.readline()
    finally:
        writer.close()
        await writer.wait_closed()


# --- replies


async def test_a_flushed_script_cache_is_no_error(broker: Broker) -> None:
    queue = Queue(broker, "m")
    await broker.command("SCRIPT", "FLUSH")
    assert (await queue.lead("take", "d1")).word == "leader"
    await broker.command("SCRIPT", "FLUSH")
    words = await asyncio.gather(*(queue.lead("take", "d2") for _ in range(100)))
    assert {w.word for w in words} == {"held"}


async def test_other_errors_are_refusals(broker: Broker) -> None:
    await broker.command("SET", "fl:{m}:board", "not a hash")
    with pytest.raises(BrokerRefused, match="WRONGTYPE"):
        await Queue(broker, "m").lead("take", "d1")
    with pytest.raises(BrokerRefused):
        await broker.command("NO-SUCH-COMMAND")
    assert await usable(broker)


async def test_replies_come_as_redis_sent_them(broker: Broker) -> None:
    assert await broker.command("HSET", "h", "a", 1) == 1
    assert await broker.command("HGETALL", "h") == [b"a", b"1"]
    assert await broker.command("EXPIRE", "h", 100) == 1
    assert await broker.command("GET", "none") is None
    assert await broker.command("ECHO", b"\0" * 200_000) == b"\0" * 200_000
    assert abs(await broker.now_ms() - int((await broker.command("TIME"))[0]) * 1000) < 2_000


@pytest.mark.parametrize("seed", range(3))
async def test_a_cancelled_caller_leaves_its_reply_to_nobody(broker: Broker, seed: int) -> None:
    rng = random.Random(seed)

    async def ask(marker: str) -> None:
        for turn in range(5):
            text = f"{marker}-{turn}"
            assert await broker.command("ECHO", text) == text.encode()

    tasks = [asyncio.create_task(ask(str(n))) for n in range(300)]
    while waiting := [t for t in tasks if not t.done()]:
        for task in rng.sample(waiting, k=min(len(waiting), rng.randrange(12))):
            task.cancel()
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [r for r in results if isinstance(r, Exception)] == []
    assert any(isinstance(r, asyncio.CancelledError) for r in results)
    assert await broker.command("ECHO", "after") == b"after"


async def test_an_argument_that_cannot_be_sent_shifts_no_reply(own: Broker) -> None:
    with pytest.raises(TypeError):
        await own.command("ECHO", object())  # type: ignore[arg-type]
    assert await own.command("ECHO", "mine") == b"mine"


async def test_more_commands_than_may_wait_are_refused_at_once(server: RedisServer) -> None:
    broker = Broker(RedisLink(server.url, timeout_s=TIMEOUT_S, pending_max=20))
    async with running(broker):
        await wait_until(broker.up.is_set)
        replies = await asyncio.gather(
            *(broker.command("ECHO", n) for n in range(30)), return_exceptions=True
        )
    assert replies[:20] == [str(n).encode() for n in range(20)]
    assert all(isinstance(r, BrokerDown) for r in replies[20:])


# --- losses


@pytest.mark.processes
async def test_a_silent_server_is_left_and_found_again(own: Broker, server: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    epoch = own.epoch
    server.pause()
    began = loop.time()
    replies = await asyncio.gather(
        *(own.command("ECHO", n) for n in range(50)), return_exceptions=True
    )
    assert loop.time() - began < 2 * TIMEOUT_S + SLACK_S
    assert all(isinstance(r, BrokerUncertain) for r in replies)
    await wait_until(lambda: not own.up.is_set())
    began = loop.time()
    with pytest.raises(BrokerError):
        await own.command("ECHO", "x")
    assert loop.time() - began < 2 * TIMEOUT_S + SLACK_S
    server.resume()
    await wait_until(lambda: usable(own), what="the resumed server")
    assert own.epoch > epoch, "nothing runs on a new connection before its epoch is known"


@pytest.mark.processes
async def test_a_killed_server_fails_who_waits_and_raises_the_epoch(
    own: Broker, server: RedisServer
) -> None:
    changed = own.epoch_event()
    waiting = [asyncio.create_task(own.command("BLPOP", "none", 0))]
    waiting += [asyncio.create_task(own.command("ECHO", n)) for n in range(20)]
    await asyncio.sleep(0)
    epoch = own.epoch
    server.kill()
    replies = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(r, BrokerUncertain) for r in replies)
    await wait_until(lambda: not own.up.is_set())
    with pytest.raises(BrokerDown):
        await own.command("ECHO", "x")
    assert not changed.is_set()
    server.start()
    async with asyncio.timeout(5):
        await changed.wait()
        await own.up.wait()
    assert own.epoch == epoch + 1
    assert (await Queue(own, "m").lead("take", "d1")).word == "leader"


@pytest.mark.processes
@pytest.mark.parametrize("verbs", [False, True])
async def test_a_demoted_master_is_left(server: RedisServer, verbs: bool) -> None:
    broker = Broker(open_link(server.url, timeout_s=10))
    queue = Queue(broker, "m")

    async def write() -> object:
        return await (queue.lead("take", "d1") if verbs else broker.command("SET", "a", "1"))

    async def written() -> bool:
        try:
            await write()
        except BrokerError:
            return False
        return True

    async with running(broker) as task:
        await wait_until(broker.up.is_set)
        epoch = broker.epoch
        assert await direct(server, "REPLICAOF", "127.0.0.1", str(free_port())) == b"+OK\r\n"
        replies = await asyncio.gather(*(write() for _ in range(3_000)), return_exceptions=True)
        assert all(isinstance(r, BrokerError) for r in replies)
        assert isinstance(replies[0], BrokerRefused)
        await wait_until(lambda: broker.epoch > epoch, what="a new connection")
        assert await direct(server, "REPLICAOF", "NO", "ONE") == b"+OK\r\n"
        await wait_until(written, what="a write to the promoted server")
        assert not task.done()


@pytest.mark.processes
async def test_a_server_that_is_paused_before_the_connection(server: RedisServer) -> None:
    broker = Broker(open_link(server.url, timeout_s=TIMEOUT_S))
    server.pause()
    async with running(broker):
        loop = asyncio.get_running_loop()
        until = loop.time() + 3 * TIMEOUT_S
        await wait_until(lambda: loop.time() > until)
        assert not broker.up.is_set()
        with pytest.raises(BrokerError):
            await broker.command("ECHO", "x")
        server.resume()
        await wait_until(broker.up.is_set)
        assert await usable(broker)


async def test_no_server_at_all(caplog: pytest.LogCaptureFixture) -> None:
    broker = Broker(open_link(f"redis://127.0.0.1:{free_port()}", timeout_s=TIMEOUT_S))
    async with running(broker):
        await wait_until(lambda: "redis unavailable" in caplog.text)
        with pytest.raises(BrokerDown):
            await broker.command("ECHO", "x")
    assert broker.epoch == 0


@pytest.mark.processes
async def test_a_loss_is_told_once(
    own: Broker, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    await wait_until(lambda: caplog.text.count("redis unavailable") == 1)
    until = asyncio.get_running_loop().time() + 1
    await wait_until(lambda: asyncio.get_running_loop().time() > until)
    assert caplog.text.count("redis unavailable") == 1


async def test_the_embedded_broker_can_go_away_and_come_back() -> None:
    server = fakeredis.FakeServer()
    broker = Broker(open_link(None, server=server))
    async with running(broker):
        await wait_until(broker.up.is_set)
        server.connected = False
        with pytest.raises(BrokerUncertain):
            await broker.command("ECHO", "x")
        with pytest.raises(BrokerDown):
            await broker.command("ECHO", "x")
        server.connected = True
        await wait_until(lambda: usable(broker))
        assert broker.epoch == 2


# --- what must not be used


async def test_a_url_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url"):
        open_link("http://127.0.0.1")


async def test_a_redis_that_may_drop_jobs_is_refused(own: Broker) -> None:
    await own.check()
    await own.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="noeviction"):
        await own.check()


async def test_any_server_that_fairlane_made_itself_is_fine(broker: Broker) -> None:
    await broker.check()


# --- subscriptions


async def test_a_subscription_is_made_again(broker: Broker) -> None:
    got: list[bytes] = []
    stood: list[int] = []
    subscriber = Subscriber(broker, ["a", "b"], lambda m: got.append(m[1]), lambda: stood.append(1))
    task = asyncio.create_task(subscriber.run())
    try:
        for round_ in (1, 2, 3):
            await wait_until(subscriber.ready.is_set)
            assert len(stood) == round_
            assert await broker.publish("a", b"%d" % round_) == 1
            assert await broker.publish("b", b"x") == 1
            await wait_until(functools.partial(has, got, 2 * round_))
            subscriber.drop()
            await wait_until(lambda: not subscriber.ready.is_set())
        assert got == [b"1", b"x", b"2", b"x", b"3", b"x"]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await wait_until(lambda: nobody_listens(broker))


def has(got: list[bytes], n: int) -> bool:
    return len(got) == n


async def nobody_listens(broker: Broker) -> bool:
    return await broker.publish("a", b"") == 0


@pytest.mark.processes
async def test_a_subscription_survives_its_server(own: Broker, server: RedisServer) -> None:
    got: list[bytes] = []
    subscriber = Subscriber(own, ["a"], lambda m: got.append(m[1]))
    task = asyncio.create_task(subscriber.run())
    try:
        await wait_until(subscriber.ready.is_set)
        await direct(server, "CLIENT", "KILL", "TYPE", "pubsub")
        await wait_until(lambda: not subscriber.ready.is_set())
        await wait_until(subscriber.ready.is_set)
        server.restart(kill=True)
        await wait_until(lambda: not subscriber.ready.is_set())
        await wait_until(subscriber.ready.is_set)
        await wait_until(lambda: usable(own))
        big = b"x" * 300_000
        assert await own.publish("a", big) == 1
        await wait_until(lambda: got == [big])
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_fault_in_the_receiver_is_not_swallowed(broker: Broker) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    subscriber = Subscriber(broker, ["a"], fail)
    task = asyncio.create_task(subscriber.run())
    await wait_until(subscriber.ready.is_set)
    await broker.publish("a", b"x")
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(5):
            await task


@pytest.mark.looptime
async def test_what_is_tried_again_waits_for_a_connection() -> None:
    """Not for nothing where there is one, and no longer than it may."""
    broker, loop = (
        Broker(open_link(None, server=fakeredis.FakeServer())),
        asyncio.get_running_loop(),
    )
    start = loop.time()
    assert not await broker.back(1.0, start + 5.0)
    assert loop.time() == start + 5.0
    loop.call_later(3.0, broker.up.set)
    assert await broker.back(1.0, start + 60.0)
    assert loop.time() == start + 8.0
    assert await broker.back(1.0, start + 60.0)
    assert loop.time() == start + 9.0
    assert not await broker.back(1.0, start + 9.5)
    assert not await broker.back(1.0, start)
    assert loop.time() == start + 9.5
