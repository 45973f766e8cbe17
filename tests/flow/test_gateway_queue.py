"""`GET /v1/queue`, the times that waiting streams are told, and `Retry-After` of a full queue."""

import asyncio
import contextlib
import json
from collections import Counter
from typing import Any

import pytest

from bench.eta_error import errors, median, told
from common.cost import Terms
from common.jobs import Limits, NewJob
from common.key_settings import KeySettings
from common.queue import Queue
from common.settings import GatewaySettings, ModelSettings, Settings
from gateway.server import Gateway
from sim.settings import EngineSettings
from tests.flow.pops import Pops
from tests.flow.world import Process, World, virtual_redis_clock, world
from tests.support.asgi import Exchange, ask
from tests.support.gateway import MODEL, Site, site
from tests.support.wait import pass_time, wait_until

CHAT, QUEUE = "/v1/chat/completions", "/v1/queue"
ALICE = ("Authorization", "Bearer sk-test-alice")
BOB = ("Authorization", "Bearer sk-test-bob00")
WEBUI = ("Authorization", "Bearer sk-test-webui")
TEAM = ("Authorization", "Bearer sk-test-team1")
PERSON = "X-OpenWebUI-User-Id"
KEYS = [
    KeySettings(secret="sk-test-alice", user="alice", classes=["standard", "interactive", "batch"]),
    KeySettings(secret="sk-test-bob00", user="bob", models=["other"]),
    KeySettings(secret="sk-test-webui", user="webui", user_from=[f"header:{PERSON}", "body:user"]),
    KeySettings(secret="sk-test-team1", user="team", user_from=["body:user"], sub_users="separate"),
]
KEYED = Settings(keys=KEYS, models={MODEL: ModelSettings(), "other": ModelSettings()})
WIDE = Limits(10_000, 1 << 30, 10_000, 1 << 30, 10_000, 1 << 30)
EMPTY = {"object": "list", "data": [], "models": {}, "truncated": False}


def body(**fields: Any) -> bytes:
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(sent).encode()


async def listed(s: Site, *headers: tuple[str, str], client: str = "127.0.0.1") -> Any:
    """What the queue shows now: an answer of before is not kept so long."""
    await pass_time(1.1)
    async with Exchange(s.app, "GET", QUEUE, headers=headers, client=client) as e:
        await e.until_over()
    assert e.status == 200 and e.headers["content-type"] == "application/json"
    assert e.headers["cache-control"] == "no-store"
    return e.json


async def elsewhere(s: Site, job: str, user: str, sub: str = "", cls: str = "standard") -> None:
    """A job that waits by way of another replica."""
    new = NewJob(
        id=job, user=user, sub=sub, cls=cls, wait_ms=600_000, terms=Terms(1000.0, 0.0, 0.0, 0),
        weight=1.0, replica="gateway-other-2", meta=b"", body=b"{}",
    )  # fmt: skip
    assert (await s.dispatcher.queue.enqueue(new, WIDE)).word == "queued"


# --- the listing


async def test_who_may_ask_and_how() -> None:
    async with site(KEYED) as s:
        wrong = await ask(s.app, "GET", QUEUE, headers=[("Authorization", "Bearer no")])
        assert wrong.status == 401 and wrong.json["error"]["code"] == "invalid_api_key"
        assert (await ask(s.app, "GET", QUEUE)).status == 401
        post = await ask(s.app, "POST", QUEUE, b"{}", headers=[ALICE])
        assert post.status == 405 and post.headers["allow"] == "GET, HEAD"
        assert (await ask(s.app, "GET", QUEUE + "/x", headers=[ALICE])).status == 404
        head = await ask(s.app, "HEAD", QUEUE, headers=[ALICE])
        assert head.status == 200 and head.body == b"" and int(head.headers["content-length"])
        assert (await ask(s.app, "GET", QUEUE, headers=[ALICE])).json == EMPTY
        long = await ask(s.app, "GET", QUEUE, headers=[WEBUI, (PERSON, "x" * 257)])
        assert long.status == 400
        s.server.connected = False
        await s.broker.link.close()
        await wait_until(lambda: not s.broker.up.is_set())
        down = await ask(s.app, "GET", QUEUE, headers=[BOB])
        assert down.status == 503 and 1 <= int(down.headers["retry-after"]) <= 60


@pytest.mark.looptime
async def test_own_jobs_from_their_first_to_their_last_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    virtual_redis_clock(monkeypatch)
    async with site(KEYED, drain=0.5) as s:
        async with contextlib.AsyncExitStack() as stack:
            for cls in ("batch", "standard", "standard"):
                e = Exchange(s.app, "POST", CHAT, body(), [ALICE, ("X-Fairlane-Class", cls)])
                await stack.enter_async_context(e)
                await pass_time(0.1)
            await s.one_waits(3)
            await elsewhere(s, "theirs", "bob")
            await elsewhere(s, "mine too", "alice")
            await pass_time(3.0)
            run = await s.dispatcher.pop()
            found = await listed(s, ALICE)
            assert [(j["class"], j["state"], j["position"]) for j in found["data"]] == [
                ("standard", "waiting", 2), ("standard", "waiting", 3), ("batch", "waiting", 4),
                ("standard", "running", None),
            ]  # fmt: skip
            assert found["data"][1]["id"] == "mine too", "whichever replica it came by"
            assert found["data"][3]["id"] == run.lease.job
            assert all(j["object"] == "queue.job" and j["model"] == MODEL for j in found["data"])
            times = [j["eta_s"] for j in found["data"][:3]]
            assert times == sorted(times) and times[0] > 0 and found["data"][3]["eta_s"] is None
            waited = [j["waiting_s"] for j in found["data"]]
            assert all(3.0 <= w <= 5.5 for w in waited), waited
            created = [j["created"] for j in found["data"]]
            assert max(created) - min(created) <= 1
            assert found["models"] == {
                MODEL: {"standard": {"waiting": 2, "running": 1},
                        "batch": {"waiting": 1, "running": 0}}
            }  # fmt: skip
            assert not found["truncated"]
            assert await listed(s, BOB) == EMPTY, "not of a model that the key may not use"
            await run.answer(b"{}")
            await wait_until(lambda: len(s.gateway.desk) == 2, what="an answer")
            assert len((await listed(s, ALICE))["data"]) == 3
        await wait_until(lambda: len(s.gateway.desk) == 0)
        assert [j["id"] for j in (await listed(s, ALICE))["data"]] == ["mine too"]


@pytest.mark.looptime
async def test_a_job_that_waits_is_told_why_none_of_its_class_is_sent() -> None:
    async with site(KEYED) as s:
        await elsewhere(s, "first", "alice")
        await elsewhere(s, "second", "alice")
        await elsewhere(s, "work", "alice", cls="batch")
        await s.dispatcher.announce(closed={"batch": "2 of other classes not started"})
        await s.dispatcher.pop()
        await pass_time(2.0)
        told = [(j["state"], j["reason"]) for j in (await listed(s, ALICE))["data"]]
        assert told == [
            ("waiting", None), ("waiting", "2 of other classes not started"), ("running", None)
        ]  # fmt: skip


@pytest.mark.looptime
async def test_the_leader_says_why_its_engines_take_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        gateway = await gateway_of(w)
        for _ in range(20):
            await w.ask("u", output=200)
        await wait_until(lambda: gateway.models.closed("m1", "standard"), timeout=10, what="why")
        assert gateway.models.closed("m1", "standard") == "3 waiting ≥ limit 3"
        assert gateway.models.closed("m1", "batch") is None, "none of it waits"


async def ids(s: Site, *headers: tuple[str, str], client: str = "127.0.0.1") -> list[str]:
    return [j["id"] for j in (await listed(s, *headers, client=client))["data"]]


@pytest.mark.looptime
async def test_of_a_divided_key_each_person_sees_their_own() -> None:
    async with site(KEYED) as s:
        await elsewhere(s, "of ann", "webui", "ann")
        await elsewhere(s, "of bea", "webui", "bea")
        await elsewhere(s, "of nobody", "webui", "-")
        await elsewhere(s, "of a team's bea", "team/bea")
        await elsewhere(s, "of a team's nobody", "team/-")
        assert await ids(s, WEBUI, (PERSON, "ann")) == ["of ann"]
        assert await ids(s, WEBUI, (PERSON, "bea")) == ["of bea"]
        assert await ids(s, WEBUI, (PERSON, "cat")) == []
        assert await ids(s, WEBUI) == ["of nobody"], "no name shows nobody's, never all"
        assert await ids(s, WEBUI, (PERSON, "-")) == []
        assert await ids(s, TEAM, (PERSON, "bea")) == ["of a team's nobody"]
        assert await ids(s, ALICE, (PERSON, "ann")) == []


@pytest.mark.looptime
async def test_without_keys_it_is_the_token_or_the_address() -> None:
    async with site() as s:
        token = ("Authorization", "Bearer anything")
        async with (
            Exchange(s.app, "POST", CHAT, body(), [token]) as first,
            Exchange(s.app, "POST", CHAT, body(), client="10.0.0.1") as second,
            Exchange(s.app, "POST", CHAT, body(user="named"), client="10.0.0.1"),
        ):
            await s.one_waits(3)
            with_token, from_there = await ids(s, token), await ids(s, client="10.0.0.1")
            assert len(with_token) == len(from_there) == 1 and with_token != from_there
            assert await ids(s, client="10.0.0.2") == []
            for _ in range(3):
                await (await s.dispatcher.pop()).answer(b"{}")
            jobs = [(await e.until_over()).headers["x-fairlane-job"] for e in (first, second)]
            assert jobs == [*with_token, *from_there]


@pytest.mark.looptime
async def test_a_long_list_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.queue.SNAPSHOT_MAX", 4)
    monkeypatch.setattr("gateway.listing.JOBS_MAX", 6)
    async with site(KEYED) as s:
        for n in range(4):
            await elsewhere(s, f"s{n}", "alice")
        found = await listed(s, ALICE)
        assert len(found["data"]) == 4 and not found["truncated"]
        await elsewhere(s, "s4", "alice")
        found = await listed(s, ALICE)
        assert len(found["data"]) == 4 and found["truncated"]
        assert found["models"][MODEL]["standard"] == {"waiting": 5, "running": 0}
        for n in range(4):
            await elsewhere(s, f"i{n}", "alice", cls="interactive")
        found = await listed(s, ALICE)
        assert len(found["data"]) == 6 and found["truncated"]


@pytest.mark.looptime
async def test_whoever_asks_all_the_time_gets_one_answer_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with site(KEYED) as s:
        asked: Counter[str] = Counter()
        of = s.gateway.desk.queues.of

        def counted(model: str) -> Any:
            asked[model] += 1
            return of(model)

        monkeypatch.setattr(s.gateway.desk.queues, "of", counted)
        for _ in range(3):
            answers = await asyncio.gather(
                *(ask(s.app, "GET", QUEUE, headers=[ALICE]) for _ in range(20))
            )
            assert [a.json for a in answers] == [EMPTY] * 20
            await pass_time(1.1)
        assert asked == {MODEL: 3, "other": 3}


# --- the times


def engine(**more: Any) -> EngineSettings:
    return EngineSettings(model="m1", max_num_seqs=4, step_ms=100, per_seq_us=0.0, **more)


async def gateway_of(w: World, name: str = "gateway-http-1") -> Gateway:
    """A whole gateway in a world that has engines."""
    process = Process(w.server, w.url)
    gateway = Gateway(w.settings, process.broker, name)
    process.start(process.broker.run(), gateway.run())
    w.gateways.append((process, gateway.follower))
    await wait_until(lambda: gateway.up and not gateway.not_ready(), timeout=30)
    return gateway


@pytest.mark.looptime
@pytest.mark.parametrize(("warm_s", "bound"), [(0, 0.3), (40, 0.2)])
async def test_what_waiting_streams_are_told_is_what_happens(
    warm_s: int, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that ends two jobs a second. In the first minute the rate that dispatchers announce
    is far too low, for it is that of a whole one: what was seen must outweigh it."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        gateway, pops = await gateway_of(w), Pops(w, monkeypatch)
        for n in range(4):  # so that its four places do not all end jobs at the same moments
            await w.ask("warm", output=5 + 5 * n)
        for _ in range(2 * warm_s):
            await w.ask("warm", output=20)
        await pass_time(warm_s)
        sent = {u: body(user=u, stream=True, max_tokens=20, ignore_eos=True) for u in "abc"}
        waits = [Exchange(gateway.app, "POST", CHAT, sent[u]) for _ in range(18) for u in sent]
        async with contextlib.AsyncExitStack() as stack:
            for e in waits:
                await stack.enter_async_context(e)
            for e in waits:
                await e.until_over(300)
        turns = {went.lease.job: went.at for went in pops.went}
        found: list[float] = []
        off: list[int] = []
        for e in waits:
            turn = turns[e.headers["x-fairlane-job"]]
            comments = told(e.pieces)
            found += errors(comments, turn)
            gone = (sum(c.at < at <= turn for at in turns.values()) for c in comments)
            off += [abs(c.position - n) for c, n in zip(comments, gone, strict=True)]
        print(f"{len(found)} times told, median error {median(found):.3f}, max {max(found):.3f}")
        assert len(found) > 30 and median(found) <= bound
        assert max(off) == 0, "places are the turns that followed"


@pytest.mark.looptime
async def test_a_rate_is_known_as_announced_while_a_backend_answers() -> None:
    async with site(drain=0.0) as s:
        assert s.gateway.models.drain(MODEL) == 0.0
        await s.dispatcher.announce(drain=1.5)
        await pass_time(2.0)
        assert s.gateway.models.drain(MODEL) == 1.5
        await s.dispatcher.announce(ready=False)
        await pass_time(2.0)
        assert s.gateway.models.drain(MODEL) is None


@pytest.mark.looptime
async def test_one_job_of_each_lane_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.watch.FOLLOWED_MAX", 2)
    looks: list[list[str]] = []
    snapshot = Queue.snapshot

    async def seen(self: Queue, asked: Any = (), *rest: Any, **more: Any) -> Any:
        looks.append([job for _, _, job in asked])
        return await snapshot(self, asked, *rest, **more)

    monkeypatch.setattr(Queue, "snapshot", seen)
    async with site() as s, contextlib.AsyncExitStack() as stack:
        await pass_time(5.0)
        assert looks == [], "nothing waits"
        for user in "aabbcc":
            await stack.enter_async_context(Exchange(s.app, "POST", CHAT, body(user=user)))
        await s.one_waits(6)
        await pass_time(1.5)
        assert looks == [], "nothing has waited long"
        await pass_time(8.0)
        assert len(looks) in (3, 4) and all(sorted(k) == sorted(looks[0]) for k in looks)
        assert len(looks[0]) == 2
        runs = [await s.dispatcher.pop() for _ in range(6)]
        followed = {r.lease.user for r in runs if r.lease.job in looks[0]}
        assert len(followed) == 2
        await pass_time(10.0)
        last = len(looks)
        await pass_time(10.0)
        assert len(looks) == last, "all of them run, and are not looked at any more"
        for run in runs:
            await run.answer(b"{}")
        await s.at_rest()
        assert len(s.gateway._watch._eta) == 3 + 1, "three lanes and a class, no job"


@pytest.mark.looptime
async def test_no_time_is_told_where_nothing_can_run() -> None:
    async with (
        site(Settings(gateway=GatewaySettings(comment_first_s=1, comment_every_s=2))) as s,
        Exchange(s.app, "POST", CHAT, body(stream=True)) as e,
    ):
        await e.until(b": queued position=1 eta=1\n")
        await s.dispatcher.announce(ready=False)
        await e.until(b": queued position=1\n")
        await (await s.dispatcher.pop()).stream(b"data: [DONE]\n\n")
        await e.until_over()


@pytest.mark.looptime
async def test_a_full_queue_says_when_one_more_fits() -> None:
    """As fast as the user's own jobs left it, whatever the rate of the model."""
    settings = Settings(gateway=GatewaySettings(user_jobs_max=3))
    async with site(settings, drain=50.0) as s, contextlib.AsyncExitStack() as stack:

        async def one() -> None:
            await stack.enter_async_context(Exchange(s.app, "POST", CHAT, body(user="a")))

        for n in range(3):
            await one()
            await s.one_waits(n + 1)
        assert (await ask(s.app, "POST", CHAT, body(user="a"))).headers["retry-after"] == "1"
        for _ in range(4):
            await pass_time(7.0)
            await (await s.dispatcher.pop()).answer(b"{}")
            await one()
            await s.one_waits(3)
        full = await ask(s.app, "POST", CHAT, body(user="a"))
        assert full.status == 429 and 7 <= int(full.headers["retry-after"]) <= 8
        await pass_time(500)
        late = await ask(s.app, "POST", CHAT, body(user="a"))
        assert late.status == 429 and int(late.headers["retry-after"]) == 60
