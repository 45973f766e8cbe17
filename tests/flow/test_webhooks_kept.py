"""Webhooks whose jobs are deleted, or forgotten, before they are taken."""

from collections.abc import Mapping

import pytest

from common import keys
from tests.flow.http import ALICE, BOB, Site, job
from tests.flow.test_webhooks import KEYS, SECRET, URL, Hooks, engine, submit
from tests.flow.world import world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize("taken", [True, False])
async def test_its_receiver_deletes_the_job(monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
    """Which is before anybody writes down that the webhook was taken, or was not."""

    class Deletes(Hooks):
        async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
            status = await super().post(url, body, headers)
            id = self.posts[-1].data["data"]["id"]
            assert (await a.ask("DELETE", f"/v1/jobs/{id}")).json["deleted"]
            return status

    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Deletes(200 if taken else 500)
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        id = await submit(a, idempotency_key="k")
        await wait_until(lambda: hooks.posts, timeout=30)
        await pass_time(10)
        broker = a.process.broker
        assert await broker.command("KEYS", keys.JOBS + "*") == [], "nothing without an end"
        assert await broker.command("ZCARD", keys.WEBHOOKS) == 0
        assert await submit(a, idempotency_key="k") == id
        await wait_until(lambda: len(hooks.posts) == 2, timeout=30, what="the new job's webhook")


async def test_a_try_after_the_answer_is_gone_says_how_the_job_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hooks(500, 500)
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        id = await submit(a, ttl=60)
        await wait_until(lambda: len(hooks.posts) == 2, timeout=30)
        k = keys.ModelKeys("m1")
        assert await a.process.broker.command("DEL", k.record(id), k.log(id)) == 2  # it expired
        await wait_until(lambda: len(hooks.posts) == 3, timeout=500)
        assert [p.data["type"] for p in hooks.posts] == ["job.completed"] * 3
        assert len({p.body for p in hooks.posts}) == 1
        assert hooks.posts[2].at - hooks.posts[0].at > 300


async def test_many_that_one_user_has_hold_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.webhooks.TAKEN_MAX", 8)

    class Hangs(Hooks):
        async def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> int:
            self.hangs = url == URL
            return await super().post(url, body, headers)

    async with world(monkeypatch, {"e1": engine()}) as w:
        hooks = Hangs()
        a = await Site(w, "a", KEYS, hooks, webhook_secret=SECRET).start()
        for _ in range(30):
            await submit(a, ALICE)
        await wait_until(lambda: len(hooks.posts) >= 4, timeout=60)
        await pass_time(20)
        made = await a.ask("POST", "/v1/jobs", job(5, webhook="https://hooks.example/b"), key=BOB)
        assert made.status == 202
        await wait_until(
            lambda: any(p.url.endswith("/b") for p in hooks.posts), timeout=12, what="bob's"
        )
