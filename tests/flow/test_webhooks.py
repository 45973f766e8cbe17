"""Webhooks of durable jobs: each is sent once it has ended, whoever dies, and given up at last."""

import asyncio
import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import pytest

from common import keys
from common.job_settings import webhook_key
from common.key_settings import KeySettings
from gateway.sender import NotSentError
from gateway.webhook import RETRIES_S, signed
from gateway.webhooks import LOCK_S
from sim.settings import EngineSettings
from tests.flow.http import ALICE, BOB, Site, job
from tests.flow.world import world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OWN = "whsec_" + "QUJD" * 10
URL = "https://hooks.example/a"
KEYS = [
    KeySettings(secret=ALICE, user="alice"),
    KeySettings(secret=BOB, user="bob", webhook_secret=OWN),
]


class Post(Exception):
    """One webhook as it was sent."""

    def __init__(self, at: float, url: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.at, self.url, self.body, self.headers = at, url, body, headers
        self.data: dict[str, Any] = json.loads(body)
        self.id = headers["webhook-id"]


class Hooks:
    """The other end. `answers` are given one after another; then 200."""

    def __init__(self, *answers: int | None, hangs: bool = False) -> None:
        self.answers = list(answers)
        self.hangs = hangs
        self.posts: list[Post] = []
        self.open = self.most = 0

    async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
        self.posts.append(Post(asyncio.get_running_loop().time(), url, body, headers))
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.hangs:
                await pass_time(8)
                raise NotSentError("TimeoutError")
            answer = self.answers.pop(0) if self.answers else 200
            if answer is None:
                raise NotSentError("ClientConnectorError")
            return answer
        finally:
            self.open -= 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


def engine() -> EngineSettings:
    return EngineSettings(model="m1", max_num_seqs=4, step_ms=20, seed=1)


async def submit(site: Site, key: str = ALICE, **more: Any) -> str:
    made = await site.ask("POST", "/v1/jobs", job(5, webhook=URL, **more), key=key)
    assert made.status == 202, made.body
    return str(made.json["id"])


async def left(site: Site) -> list[bytes]:
    """What Redis has of webhooks."""
    found = []
    for pattern in (keys.WEBHOOKS, keys.WEBHOOK + "*", "*:ended:*"):
        found += await site.process.broker.command("KEYS", pattern)
    return found


async def test_a_webhook_is_signed_and_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks()
        sites = [
            await Site(w, f"g{n}", KEYS, hooks, webhook_secret=SECRET).start() for n in range(3)
        ]
        id = await submit(sites[0], metadata={"k": "v"})
        bobs = await submit(sites[1], BOB)
        await pass_time(60)
        assert sorted(p.id for p in hooks.posts) == sorted([f"msg_{id}", f"msg_{bobs}"])
        for post in hooks.posts:
            mine = post.id == f"msg_{id}"
            key = webhook_key(SECRET if mine else OWN)
            at = int(post.headers["webhook-timestamp"])
            made = signed(post.id, at, post.body, [key])
            assert post.headers["webhook-signature"] == made["webhook-signature"]
            assert post.data["type"] == "job.completed" and "result" not in post.data["data"]
            assert post.data["data"]["metadata"] == ({"k": "v"} if mine else {})
        assert await left(sites[0]) == []
        metrics = (await sites[0].ask("GET", "/metrics")).body
        assert b"fairlane_gateway_webhooks" in metrics


async def test_ends_of_all_kinds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks()
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        long = job(4_000, webhook=URL)
        ids = [(await a.ask("POST", "/v1/jobs", long)).json["id"] for _ in range(9)]
        await pass_time(2)
        for id in (ids[0], ids[-1]):
            assert (await a.ask("DELETE", f"/v1/jobs/{id}")).json["state"] == "cancelled"
        await wait_until(lambda: len(hooks.posts) == 2, timeout=10, what="both")
        assert {p.data["data"]["id"] for p in hooks.posts} == {ids[0], ids[-1]}
        assert {p.data["type"] for p in hooks.posts} == {"job.cancelled"}
        assert all(p.data["data"]["error"]["code"] == "cancelled" for p in hooks.posts)


async def test_one_that_is_not_taken_is_sent_again_and_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks(500, None, 302, 404)
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        id = await submit(a)
        await wait_until(lambda: len(hooks.posts) == 2, timeout=30, what="the second")
        gap = hooks.posts[1].at - hooks.posts[0].at
        assert RETRIES_S[0] <= gap <= RETRIES_S[0] * 1.2 + 2
        broker = a.process.broker
        due = float(await broker.command("ZSCORE", keys.WEBHOOKS, id))
        wait_s = (due - await broker.now_ms()) / 1000
        assert RETRIES_S[1] - 2 <= wait_s <= RETRIES_S[1] * 1.2
        # As if all but the last two tries had been.
        await broker.command("HSET", keys.JOBS + id, "hooks", len(RETRIES_S) - 1)
        for tries in (3, 4):
            await broker.command("ZADD", keys.WEBHOOKS, "XX", 0, id)
            await wait_until(lambda: len(hooks.posts) == tries, timeout=5, what="once more")  # noqa: B023
            await pass_time(0.1)
        assert {p.id for p in hooks.posts} == {f"msg_{id}"}
        assert await left(a) == []


async def test_a_gateway_that_is_killed_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hanging, hooks = Hooks(hangs=True), Hooks()
        a = await Site(w, "a", KEYS, hanging, webhook_secret=SECRET).start()
        ids = [await submit(a) for _ in range(3)]
        await wait_until(lambda: len(hanging.posts) == 3, timeout=30, what="on their way")
        await a.process.kill()
        b = await Site(w, "b", KEYS, hooks, webhook_secret=SECRET).start()
        await pass_time(10)
        assert hooks.posts == [], "they are another's while its locks last"
        for id in ids:  # the embedded broker's keys expire by the wall clock
            assert 0 < await b.process.broker.command("PTTL", keys.WEBHOOK + id) <= LOCK_S * 1000
            await b.process.broker.command("DEL", keys.WEBHOOK + id)
        await wait_until(lambda: len(hooks.posts) == 3, timeout=90, what="sent by another")
        assert {p.id for p in hooks.posts} == {p.id for p in hanging.posts}
        assert {p.id for p in hooks.posts} == {f"msg_{id}" for id in ids}
        await pass_time(120)
        assert len(hooks.posts) == 3 and await left(b) == []


async def test_so_many_at_once_and_of_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks(hangs=True)
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET, webhooks_max=8).start()
        for _ in range(12):
            await submit(a)
        bobs = [await submit(a, BOB) for _ in range(2)]
        await pass_time(12)
        assert hooks.most == 4
        assert {f"msg_{id}" for id in bobs} <= {p.id for p in hooks.posts}


async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a", KEYS, Hooks()).start()
        none = await a.ask("POST", "/v1/jobs", job(5, webhook=URL))
        assert (none.status, none.json["error"]["code"]) == (400, "webhooks_not_configured")
        for url in ("http://127.0.0.1/", "ftp://example.org", "http://u:p@example.org/"):
            bad = await a.ask("POST", "/v1/jobs", job(5, webhook=url), key=BOB)
            assert (bad.status, bad.json["error"]["param"]) == (400, "webhook"), url
        assert (await a.ask("GET", "/v1/jobs", key=BOB)).json["data"] == []


async def test_a_job_that_was_deleted_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks(*[503] * 5)
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        id = await submit(a)
        await wait_until(lambda: hooks.posts, timeout=30, what="the first try")
        assert (await a.ask("DELETE", f"/v1/jobs/{id}")).json["deleted"]
        await pass_time(400)
        assert len(hooks.posts) == 1 and await left(a) == []


async def test_one_that_was_taken_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a gateway that was slow puts a job among those that are due once more."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks()
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        id = await submit(a)
        await wait_until(lambda: hooks.posts, timeout=30, what="sent")
        await pass_time(3)
        await a.process.broker.command("ZADD", keys.WEBHOOKS, "NX", 0, id)
        await pass_time(5)
        assert len(hooks.posts) == 1 and await left(a) == []
