"""Replies over a channel that loses what it likes: in order, whole, or said to be lost."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import fakeredis
import pytest

from common import keys
from common.broker import Broker, Subscriber, open_link
from common.follow import Follower
from common.links import Message
from common.outcomes import Outcome
from common.publish import JOB_WINDOW, REPLICA_WINDOW, Outgoing, Publisher
from common.reply import Reply
from common.wire import (
    Ack,
    Cancel,
    Data,
    End,
    Head,
    Resend,
    decode_controls,
    encode_batch,
    encode_frame,
)
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime


class Lossy(Broker):
    """Loses a share of what is published to gateways."""

    loss = 0.0
    random = random.Random(0)

    async def publish(self, channel: str, data: bytes) -> int:
        if channel.startswith(keys.reply("")) and self.random.random() < self.loss:
            return 0
        return await super().publish(channel, data)


class Pair:
    """A publisher and a follower, joined as in a dispatcher and a gateway."""

    def __init__(self, server: fakeredis.FakeServer) -> None:
        self.sending = Lossy(open_link(None, server=server))
        self.receiving = Broker(open_link(None, server=server))
        self.publisher = Publisher(self.sending, "d1")
        self.follower = Follower(self.receiving, "g1")
        self.cancelled: list[Cancel] = []
        self.deaf = False
        self.controls = Subscriber(self.sending, (keys.control("d1"),), self._control)

    def _control(self, message: Message) -> None:
        for control in decode_controls(message[1]).controls:
            if self.deaf:
                continue
            if isinstance(control, Ack):
                self.publisher.acknowledge(control)
            elif isinstance(control, Resend):
                self.publisher.resend(control)
            else:
                self.cancelled.append(control)

    async def alive(self) -> None:
        while True:
            self.publisher.alive(asyncio.get_running_loop().time())
            await pass_time(1.0)

    async def send(self, out: Outgoing, batch: bytes) -> None:
        """What `start` and `settle` do with frames."""
        await self.sending.publish(keys.reply("g1"), batch)
        out.grant()


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    p = Pair(fakeredis.FakeServer())
    tasks = [
        asyncio.ensure_future(c)
        for c in (
            p.sending.run(), p.receiving.run(), p.follower.run(), p.controls.run(), p.alive()
        )
    ]  # fmt: skip
    await wait_until(
        lambda: p.follower.ready.is_set() and p.controls.ready.is_set(), what="subscribed"
    )
    yield p
    await p.publisher.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def read(reply: Reply) -> tuple[int, bytes, End]:
    """Status, text and end of a reply."""
    status, text = 0, b""
    while True:
        for frame in await reply.next():
            match frame:
                case Head():
                    status = frame.status
                case Data():
                    reply.forwarded = True
                    text += frame.data
                    reply.taken(len(frame.data))
                case End():
                    return status, text, frame


@pytest.mark.parametrize("seed", range(25))
async def test_what_is_lost_is_sent_again(seed: int) -> None:
    async with pair() as p:
        rng = p.sending.random = random.Random(seed)
        p.sending.loss = rng.choice([0.1, 0.3, 0.6])
        jobs = [f"job{n}" for n in range(4)]
        replies = [p.follower.open(j, "m1") for j in jobs]
        reading = [asyncio.ensure_future(read(r)) for r in replies]
        outs = [p.publisher.open(j, 7, "g1", keys.reply("g1")) for j in jobs]
        sent = dict.fromkeys(jobs, b"")
        for out in outs:
            await p.send(out, out.batch(out.first(200, [], True, b"<")))
            sent[out.job] += b"<"
        for n in range(60):
            out = rng.choice(outs)
            data = b"%d," % n * rng.choice([1, 1, 1, 30_000])
            await out.room()
            out.data(data)
            sent[out.job] += data
            if rng.random() < 0.3:
                await pass_time(rng.random())
        for out in outs:
            end = out.end(Outcome.FINISHED, "", None, 0.0)
            await out.flush()
            await p.send(out, out.batch([end]))
        p.sending.loss = 0.0
        got = await asyncio.wait_for(asyncio.gather(*reading), 60)
        for job, (status, text, end) in zip(jobs, got, strict=True):
            assert (status, end.outcome) == (200, Outcome.FINISHED)
            assert text == sent[job]
        await wait_until(lambda: p.publisher.open_runs() == 0, timeout=5, what="all acknowledged")
        assert all(box.unreceived == 0 for box in p.publisher._boxes.values())


async def test_what_cannot_be_sent_again_is_an_error_never_a_gap() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        reading = asyncio.ensure_future(read(reply))
        out = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        await p.send(out, out.batch(out.first(200, [], True, b"one")))
        p.sending.loss = 1.0
        out.data(b"two")
        await out.flush()
        await pass_time(0.01)
        out.received(out.seq - 1)  # the copy is gone
        p.sending.loss = 0.0
        out.data(b"three")
        _, text, end = await asyncio.wait_for(reading, 30)
        assert text == b"one"
        assert end.outcome is Outcome.LOST


async def test_windows_hold_a_sender_until_its_client_takes() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        out = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        await p.send(out, out.batch(out.first(200, [], True, b"")))
        while not out.full():
            out.data(bytes(100_000))
        assert JOB_WINDOW <= out.sent < JOB_WINDOW + 100_000
        waiting = asyncio.ensure_future(out.room())
        await pass_time(3.0)
        assert not waiting.done()
        await wait_until(lambda: p.publisher._boxes["g1"].unreceived == 0, what="received")
        frames = await reply.next()
        for frame in frames:
            if isinstance(frame, Data):
                reply.taken(len(frame.data))
        await asyncio.wait_for(waiting, 5)


async def test_a_gateway_that_acknowledges_nothing_is_sent_no_more_than_its_window() -> None:
    async with pair() as p:
        p.deaf = True
        outs = [p.publisher.open(f"job{n}", 7, "g1", keys.reply("g1")) for n in range(20)]
        for out in outs:
            p.follower.open(out.job, "m1")
            await p.send(out, out.batch(out.first(200, [], True, b"")))
        for out in outs:
            while not out.full():
                out.data(bytes(250_000))
        unreceived = p.publisher._boxes["g1"].unreceived
        assert REPLICA_WINDOW <= unreceived < REPLICA_WINDOW + 300_000


async def test_once_forwarded_no_other_run_is_spliced_in() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        reading = asyncio.ensure_future(read(reply))
        old = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        await p.send(old, old.batch(old.first(200, [], True, b"old")))
        await wait_until(lambda: reply.forwarded, what="forwarded")
        new = p.publisher.open("job", 8, "g1", keys.reply("g1"))
        await p.send(new, new.batch(new.first(200, [], True, b"new")))
        await wait_until(lambda: Cancel("job", 8) in p.cancelled, what="the other is stopped")
        old.data(b"er")
        end = old.end(Outcome.FINISHED, "", None, 0.0)
        await old.flush()
        await p.send(old, old.batch([end]))
        _, text, ended = await asyncio.wait_for(reading, 5)
        assert (text, ended.outcome) == (b"older", Outcome.FINISHED)


async def test_a_newer_run_replaces_one_of_which_nothing_was_forwarded() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        old = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        await p.send(old, old.batch(old.first(200, [], True, b"old")))
        await wait_until(lambda: reply.attempt == 7, what="the old run")
        new = p.publisher.open("job", 8, "g1", keys.reply("g1"))
        frames = [*new.first(200, [], True, b"new"), new.end(Outcome.FINISHED, "", None, 0.0)]
        await p.send(new, new.batch(frames))
        await p.send(old, old.batch([old.end(Outcome.FINISHED, "", None, 0.0)]))
        await wait_until(lambda: reply.ended, what="the end")
        assert (await read(reply))[1] == b"new"


async def test_frames_of_a_job_nobody_knows_are_answered_with_cancel() -> None:
    async with pair() as p:
        out = p.publisher.open("stranger", 7, "g1", keys.reply("g1"))
        await p.send(out, out.batch(out.first(200, [], True, b"hello")))
        await wait_until(lambda: Cancel("stranger", 7) in p.cancelled, what="cancel")


async def test_an_orphans_end_ends_the_run_it_was() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        reading = asyncio.ensure_future(read(reply))
        out = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        await p.send(out, out.batch(out.first(200, [], True, b"half")))
        await wait_until(lambda: reply.forwarded, what="forwarded")
        end = End("job", 7, -1, Outcome.ORPHANED, "gone", None)
        await p.receiving.publish(keys.reply("g1"), encode_batch("d2", [encode_frame(end)]))
        _, text, ended = await asyncio.wait_for(reading, 5)
        assert (text, ended.outcome) == (b"half", Outcome.ORPHANED)


async def test_a_lost_acknowledgement_does_not_hold_a_sender_for_ever() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        out = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        await p.send(out, out.batch(out.first(200, [], True, b"")))
        p.deaf = True
        while not out.full():
            out.data(bytes(250_000))
        received = 0
        while received < out.sent:
            for frame in await reply.next():
                if isinstance(frame, Data):
                    received += len(frame.data)
                    reply.taken(len(frame.data))
        await pass_time(1.0)
        p.deaf = False
        await asyncio.wait_for(out.room(), 5)


async def test_what_only_a_script_may_publish_is_not_sent_before_it_did() -> None:
    async with pair() as p:
        reply = p.follower.open("job", "m1")
        out = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        first = out.batch(out.first(200, [], True, b"one"))
        await pass_time(3.0)
        assert reply.attempt is None, "nobody said that the run may begin"
        await p.send(out, first)
        out.data(b" two")
        end = out.batch([out.end(Outcome.FINISHED, "", None, 0.0)])
        await pass_time(3.0)
        assert not reply.ended, "nobody said that it is over"
        await p.send(out, end)
        status, text, ended = await asyncio.wait_for(read(reply), 5)
        assert (status, text, ended.outcome) == (200, b"one two", Outcome.FINISHED)


async def test_an_end_that_comes_again_is_acknowledged_again() -> None:
    record = keys.ModelKeys("m1").record("job")
    async with pair() as p:

        async def forgotten() -> bool:
            return not await p.sending.command("EXISTS", record)

        reply = p.follower.open("job", "m1")
        out = p.publisher.open("job", 7, "g1", keys.reply("g1"))
        batch = out.batch(
            [*out.first(200, [], False, b"{}"), out.end(Outcome.FINISHED, "", None, 0.0)]
        )
        for _ in range(2):
            await p.sending.command("HSET", record, "state", "done")
            await p.send(out, batch)
            await wait_until(forgotten, timeout=5, what="acknowledged")
            reply.close()
