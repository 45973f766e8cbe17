"""The verbs of batches: one runner at a time, and what it did as a whole or not at all."""

import asyncio
import contextlib

import pytest

from common import keys
from common.batch_state import About, shown
from common.batches import LEASE_MS, OWN_MAX, SPARE_MS, Batches
from common.broker import Broker

NOW = 1_790_000_000_000
ID = "batch_" + "ab" * 16
KEEP_MS = 60_000


def about(id: str = ID, **changes: object) -> About:
    given = {
        "id": id, "owner": "u", "user": "u", "weight": 1.0, "cls": "standard", "models": [],
        "key_jobs": 1, "endpoint": "/v1/embeddings", "input_file_id": "f", "window": "1h",
        "window_ms": 3_600_000, "created_ms": NOW, "metadata": {"a": "b"},
    }  # fmt: skip
    return About(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture
async def batches(broker: Broker) -> Batches:
    made = Batches(broker, KEEP_MS)
    await made.create(about())
    return made


async def taken(batches: Batches, owner: str = "w1", now_ms: int = NOW) -> int:
    held = await batches.take("take", ID, owner, now_ms=now_ms)
    assert held.word == "yours"
    return held.fence


async def test_a_batch_is_found_as_it_was_made(batches: Batches) -> None:
    found = await batches.find(ID)
    assert found is not None
    assert found[0] == about() and found[1].status == "validating"
    assert shown(*found)["metadata"] == {"a": "b"}
    assert await batches.find("batch_x") is None


@pytest.mark.parametrize("at", range(8))
async def test_a_batch_begins_or_there_is_nothing_of_it(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """However many commands of a gateway that dies reach Redis."""
    execute, sent = broker.link.execute, 0

    async def dies(*args: object) -> object:
        nonlocal sent
        sent += 1
        if sent > at:
            raise asyncio.CancelledError
        return await execute(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(broker.link, "execute", dies)
        with contextlib.suppress(asyncio.CancelledError):
            await Batches(broker, KEEP_MS).create(about())
    batches = Batches(broker, KEEP_MS)
    begun = await batches.active(10) == [(ID, "u")]
    assert (await batches.find(ID) is not None) is begun
    assert bool((await batches.own("u", "", 10))[0]) is begun


async def test_a_repeated_creation_changes_nothing(batches: Batches, broker: Broker) -> None:
    await batches.cancel(ID)
    await batches.finished(ID, "u", "")
    await batches.create(about())
    found = await batches.find(ID)
    assert found is not None and found[1].status == "cancelling"
    assert await batches.active(10) == []
    ttl = int(await broker.command("PTTL", keys.BATCH + ID))
    assert KEEP_MS < ttl <= KEEP_MS + SPARE_MS + about().window_ms


async def test_a_list_of_batches_stays_as_long_as_the_one_that_stays_longest(
    batches: Batches, broker: Broker
) -> None:
    """A later one may have a shorter window."""

    async def ttl(key: str) -> int:
        return int(await broker.command("PTTL", key))

    own = keys.BATCHES_OF + "u"
    for n, window_ms in enumerate((600_000_000, 60_000)):
        await batches.create(about(f"{ID[:-1]}{n}", window_ms=window_ms))
        assert await ttl(own) >= await ttl(f"{keys.BATCH}{ID[:-1]}0") > 600_000_000


async def test_one_runner_at_a_time(batches: Batches) -> None:
    fence = await taken(batches)
    assert (await batches.take("take", ID, "w2", now_ms=NOW + LEASE_MS - 1)).word == "held"
    assert (await batches.take("renew", ID, "w1", fence, now_ms=NOW + 5_000)).word == "yours"
    assert (await batches.take("take", ID, "w2", now_ms=NOW + LEASE_MS)).word == "held"
    heir = await taken(batches, "w2", NOW + 5_000 + LEASE_MS)
    assert heir > fence
    assert (await batches.take("renew", ID, "w1", fence, now_ms=NOW + 6_000)).word == "lost"
    assert (await batches.take("give", ID, "w1", fence, now_ms=NOW + 6_000)).word == "lost"


async def test_what_is_given_up_may_be_taken(batches: Batches) -> None:
    fence = await taken(batches)
    assert await batches.idle([ID], NOW) == []
    await batches.take("give", ID, "w1", fence, now_ms=NOW)
    assert await batches.idle([ID], NOW) == [(ID, fence)]
    assert await taken(batches, "w2") > fence


async def test_a_fencing_number_is_never_used_again(batches: Batches, broker: Broker) -> None:
    """Also where the clock was set back, or Redis has forgotten the last ones."""
    first = await taken(batches)
    await batches.take("give", ID, "w1", first, now_ms=NOW)
    second = await taken(batches, now_ms=NOW - 100_000)
    assert second > first
    await broker.command("HDEL", keys.BATCH + ID, "fence", "until")
    assert await taken(batches, now_ms=NOW + 10) > second


async def test_a_clock_set_back_does_not_keep_a_batch(batches: Batches) -> None:
    await taken(batches, now_ms=NOW + 1_000_000)
    assert (await batches.take("take", ID, "w2", now_ms=NOW)).word == "held"
    assert await taken(batches, "w2", NOW + LEASE_MS)


async def test_another_runner_makes_another_version(batches: Batches) -> None:
    """So that who had it before sees that somebody did."""
    fence = await taken(batches)
    seen = (await batches.take("renew", ID, "w1", fence, now_ms=NOW)).version
    await batches.take("give", ID, "w1", fence, now_ms=NOW)
    same = await batches.take("take", ID, "w1", now_ms=NOW)
    assert same.version == seen
    await batches.take("give", ID, "w1", same.fence, now_ms=NOW)
    assert (await batches.take("take", ID, "w2", now_ms=NOW)).version > seen


async def commit(batches: Batches, fence: int, mark: str, **more: object) -> str:
    given = {"keep_ms": KEEP_MS, "now_ms": NOW} | more
    return (await batches.commit(ID, "w1", fence, mark, **given)).word  # type: ignore[arg-type]


async def test_a_commit_is_whole_and_once(batches: Batches, broker: Broker) -> None:
    fence = await taken(batches)
    for _ in range(2):
        word = await commit(
            batches, fence, "m1", lines=[0, 9], parts=["p.o"], fields={"completed": 2}
        )
        assert word == "done"
    assert await batches.done(ID) == bytes([0x80, 0x40])
    assert await batches.parts(ID) == ["p.o"]
    found = await batches.find(ID)
    assert found is not None and found[1].completed == 2
    assert await commit(batches, fence, "m2", lines=[1], parts=["q.o"]) == "done"
    assert await batches.parts(ID) == ["p.o", "q.o"]
    for suffix in ("", ":done", ":parts"):
        assert 0 < int(await broker.command("PTTL", keys.BATCH + ID + suffix)) <= KEEP_MS


async def test_who_lost_the_lease_writes_nothing(batches: Batches) -> None:
    fence = await taken(batches)
    await taken(batches, "w2", NOW + LEASE_MS)
    assert await commit(batches, fence, "m1", lines=[0], fields={"completed": 1}) == "lost"
    other = await batches.commit(ID, "w9", fence, "m1", lines=[0], keep_ms=1, now_ms=NOW)
    assert other.word == "lost"
    assert await batches.done(ID) == b""
    found = await batches.find(ID)
    assert found is not None and found[1].completed == 0


async def test_a_status_that_changed_is_not_overwritten(batches: Batches) -> None:
    fence = await taken(batches)
    assert await batches.cancel(ID) == "cancelling"
    held = await batches.commit(
        ID, "w1", fence, "m1", expect="validating", fields={"status": "in_progress"},
        keep_ms=1, now_ms=NOW,
    )  # fmt: skip
    assert (held.word, held.status) == ("changed", "cancelling")
    found = await batches.find(ID)
    assert found is not None and found[1].status == "cancelling"
    assert found[1].times["cancelling_at"] > 0


@pytest.mark.parametrize(
    "status", ["cancelling", "finalizing", "completed", "failed", "expired", "cancelled"]
)
async def test_what_cannot_be_cancelled_stays(
    batches: Batches, broker: Broker, status: str
) -> None:
    await broker.command("HSET", keys.BATCH + ID, "status", status)
    assert await batches.cancel(ID) == status
    assert await broker.command("HEXISTS", keys.BATCH + ID, "cancelling_at") == 0
    assert await batches.cancel("batch_none") == ""
    assert await broker.command("EXISTS", keys.BATCH + "batch_none") == 0


@pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
async def test_what_is_over_is_nobodys(batches: Batches, broker: Broker, status: str) -> None:
    await broker.command("HSET", keys.BATCH + ID, "status", status)
    assert (await batches.take("take", ID, "w1", now_ms=NOW)).word == "over"
    assert (await batches.take("take", "batch_none", "w1", now_ms=NOW)).word == "gone"


async def test_pages_of_ones_own(batches: Batches, broker: Broker) -> None:
    for n in range(5):
        await batches.create(about(f"batch_{n}", created_ms=NOW + n + 1))
        await batches.create(about(f"batch_x{n}", owner="v", created_ms=NOW + n))
    found, more = await batches.own("u", "", 2)
    assert [a.id for a, _ in found] == ["batch_4", "batch_3"] and more
    found, more = await batches.own("u", "batch_3", 10)
    assert [a.id for a, _ in found] == ["batch_2", "batch_1", "batch_0", ID] and not more
    assert await batches.own("u", "batch_x1", 10) == ([], False)
    await broker.command("DEL", keys.BATCH + "batch_4")
    found, _ = await batches.own("u", "", 2)
    assert [a.id for a, _ in found] == ["batch_3"]
    assert len((await batches.own("u", "", 10))[0]) == 5


async def test_the_list_of_ones_own_is_bounded(batches: Batches, broker: Broker) -> None:
    own = keys.BATCHES_OF + "u"
    for n in range(0, OWN_MAX, 1_000):
        pairs = [v for i in range(n, n + 1_000) for v in (NOW - i - 1, f"old{i}")]
        await broker.command("ZADD", own, *pairs)
    await batches.create(about("batch_new", created_ms=NOW + 1))
    assert await broker.command("ZCARD", own) == OWN_MAX
    assert await broker.command("ZSCORE", own, "batch_new") is not None


async def test_what_ended_counts_no_more_and_is_removed_later(
    batches: Batches, broker: Broker
) -> None:
    assert await batches.active(10) == [(ID, "u")]
    await batches.finished(ID, "u", "a/model")
    assert await batches.active(10) == []
    ((id, model),) = await batches.over_since(1 << 60, 10)
    assert (id, model) == (ID, keys.encode("a/model"))
    sink = keys.ModelKeys("a/model").ended(about().sink)
    await broker.command("RPUSH", sink, "late")
    await batches.removed(id, model)
    assert await broker.command("EXISTS", sink) == 0
    assert await batches.over_since(1 << 60, 10) == []
