"""Whose durable jobs are, how many are kept, and that none of an answer is left out."""

import asyncio
import re
from typing import Any

import pytest

from common import keys
from common.durable import About, Status
from common.key_settings import KeySettings
from common.queue import Queue
from tests.flow.http import ALICE, BOB, Site, events, job
from tests.flow.test_jobs import ended, engine
from tests.flow.world import world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime


async def test_people_of_a_key_have_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    many = KeySettings(secret=ALICE, user="webui", user_from=["header:X-User", "body:user"])
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a", [many]).start()
        ids = {}
        for name in ("ann", "ben"):
            made = await a.ask("POST", "/v1/jobs", job(3), headers={"x-user": name})
            ids[name] = made.json["id"]
        made = await a.ask("POST", "/v1/jobs", job(3, user="cai"))
        ids["cai"] = made.json["id"]
        inside = job(3)
        inside["body"]["user"] = "dan"
        ids["dan"] = (await a.ask("POST", "/v1/jobs", inside)).json["id"]
        for name, id in ids.items():
            mine = [
                await a.ask("GET", f"/v1/jobs/{id}", headers={"x-user": name}),
                await a.ask("GET", f"/v1/jobs/{id}?user={name}"),
            ]
            assert [e.status for e in mine] == [200, 200], name
            others = [
                await a.ask("GET", f"/v1/jobs/{id}"),
                await a.ask("GET", f"/v1/jobs/{id}?user=eve"),
                await a.ask("DELETE", f"/v1/jobs/{id}", headers={"x-user": "eve"}),
                await a.ask("GET", f"/v1/jobs/{id}?user={name}", headers={"x-user": "eve"}),
            ]
            assert {e.status for e in others} == {404}
            listed = (await a.ask("GET", f"/v1/jobs?user={name}")).json["data"]
            assert [j["id"] for j in listed] == [id]


async def test_so_many_are_kept_for_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a", user_kept_max=3).start()
        ids = [(await a.ask("POST", "/v1/jobs", job(3))).json["id"] for _ in range(3)]
        full = await a.ask("POST", "/v1/jobs", job(3))
        assert (full.status, full.json["error"]["code"]) == (429, "too_many_jobs")
        assert full.headers["retry-after"]
        assert (await a.ask("POST", "/v1/jobs", job(3), key=BOB)).status == 202
        await ended(a, ids[0])
        await a.ask("DELETE", f"/v1/jobs/{ids[0]}")
        assert (await a.ask("POST", "/v1/jobs", job(3))).status == 202
        assert (await a.ask("POST", "/v1/jobs", job(3))).status == 429
        await a.process.broker.command("DEL", keys.JOBS + ids[1])  # as if it had expired
        assert (await a.ask("POST", "/v1/jobs", job(3))).status == 202


async def test_an_end_that_comes_while_a_reader_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log was silent when it was read, and its job has ended when that is looked at."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(200))).json["id"]
        jobs = a.gateway._durables.jobs
        status = jobs.status
        looked = 0

        async def late(about: About) -> Status:
            nonlocal looked

            async def over() -> Any:
                found = await status(about)
                return found if found.over else None

            looked += 1
            if looked == 1:  # before anything is sent
                return await status(about)
            return await wait_until(over, timeout=60)  # type: ignore[no-any-return]

        monkeypatch.setattr(jobs, "status", late)
        told = events((await a.ask("GET", f"/v1/jobs/{id}/events")).body)
        assert looked >= 2 and b"event: result\n" in told and b"event: end\n" in told


@pytest.mark.parametrize("left", [0, 20])
async def test_back_at_an_event_that_redis_has_lost(
    monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """A Redis that was restarted may have lost the end of a log, or all of it, and a reader comes
    back before it is there again."""
    free, append = asyncio.Event(), Queue.append
    free.set()

    async def held(*args: Any, **more: Any) -> Any:
        await free.wait()
        return await append(*args, **more)

    monkeypatch.setattr(Queue, "append", held)
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(300, stream=True))).json["id"]
        path, broker = f"/v1/jobs/{id}/events", a.process.broker
        log = keys.ModelKeys("m1").log(id)
        async with a.open(path) as e:
            await wait_until(lambda: e.body.count(b"id: ") > 60, timeout=60)
            free.clear()
            await pass_time(1)
            had = events(e.body)
        last = had[had.rindex(b"id: ") + 4 :].split(b"\n")[0].decode()
        entries = await broker.command("XRANGE", log, "-", "+")
        await broker.command("DEL", log)
        for entry, fields in entries[:left]:
            await broker.command("XADD", log, entry, *fields)
        async with a.open(path, headers={"last-event-id": last}) as back:
            await pass_time(3)
            free.set()
            await back.until_over(60)
            assert back.status == 200
            whole = events((await a.ask("GET", path)).body)
            assert b"".join(map(_without_ids, (had, events(back.body)))) == _without_ids(whole)
            assert b"event: restart" not in whole


def _without_ids(told: bytes) -> bytes:
    """What was put there again may have other ids."""
    return re.sub(rb"^id: .*\n", b"", told, flags=re.M)


async def test_a_stream_that_broke_off_is_looked_at_without_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long it is: what is told of it is its status and why it ended."""
    asked = {
        "model": "m1", "input": "hello", "max_output_tokens": 4_000, "ignore_eos": True,
        "background": True, "stream": True,
    }  # fmt: skip
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        following = asyncio.ensure_future(a.ask("POST", "/v1/responses", asked))
        await a.ask("POST", "/v1/jobs", job(4_000, stream=True))
        await pass_time(30)
        made = (await a.ask("GET", "/v1/jobs")).json["data"]
        for one in made:
            assert (await a.ask("DELETE", f"/v1/jobs/{one['id']}")).json["id"]
        assert b"response.failed" in (await following).body
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=20, what="they stop")
        read, command = 0, a.process.broker.command

        async def counted(*args: Any) -> Any:
            nonlocal read
            reply = await command(*args)
            read += len(reply) if args[0] in ("XRANGE", "XREVRANGE") else 0
            return reply

        monkeypatch.setattr(a.process.broker, "command", counted)
        for one in made:
            found = (await a.ask("GET", f"/v1/jobs/{one['id']}")).json
            assert (found["state"], found["status_code"]) == ("cancelled", 200)
            assert read <= 8
            read = 0
            if one["path"] == "/v1/responses":
                found = (await a.ask("GET", f"/v1/responses/resp_{one['id']}")).json
                assert found["status"] == "cancelled" and read <= 2
                read = 0
        assert len(made) == 2
