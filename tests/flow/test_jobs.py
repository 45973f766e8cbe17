"""`/v1/jobs` from the request to the engine and back, by any replica."""

import asyncio
import json
from typing import Any

import pytest

from sim.settings import EngineSettings
from tests.flow.http import ALICE, BOB, Site, events, job
from tests.flow.world import World, world
from tests.support.asgi import Exchange
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime


def engine(**more: Any) -> EngineSettings:
    return EngineSettings(model="m1", max_num_seqs=2, step_ms=20, seed=1, **more)


async def ended(site: Site, id: str, key: str = ALICE) -> dict[str, Any]:
    """The job, once it has ended."""

    async def look() -> Any:
        found = (await site.ask("GET", f"/v1/jobs/{id}", key=key)).json
        return found if found["state"] not in ("queued", "running") else None

    return await wait_until(look, timeout=600, what="the job's end")  # type: ignore[no-any-return]


async def test_a_job_is_submitted_run_and_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a, b = await Site(w, "a").start(), await Site(w, "b").start()
        made = await a.ask("POST", "/v1/jobs", job(7, metadata={"k": "v"}, ttl=90))
        assert made.status == 202, made.body
        id = made.json["id"]
        assert made.headers["location"] == f"/v1/jobs/{id}"
        assert made.json["object"] == "job" and made.json["state"] in ("queued", "running")
        found = await ended(b, id)
        assert found["state"] == "completed" and found["error"] is None
        assert found["usage"]["output_tokens"] == 7 and found["status_code"] == 200
        assert found["result"]["usage"]["completion_tokens"] == 7
        assert found["metadata"] == {"k": "v"} and found["class"] == "standard"
        assert found["created_at"] <= found["started_at"] <= found["ended_at"]
        assert found["expires_at"] == found["ended_at"] + 90
        assert (await b.ask("DELETE", f"/v1/jobs/{id}")).json["deleted"] is True
        assert (await a.ask("GET", f"/v1/jobs/{id}")).status == 404
        assert (await a.ask("GET", "/v1/jobs")).json["data"] == []


async def test_a_waiting_job_has_a_place_and_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        ids: list[str] = []
        for _ in range(8):
            ids.append((await a.ask("POST", "/v1/jobs", job(3_000))).json["id"])
            await pass_time(0.01)  # jobs of one millisecond have no order in lists
        await pass_time(2)
        found = (await a.ask("GET", f"/v1/jobs/{ids[-1]}")).json
        assert found["state"] == "queued" and found["position"] >= 1 and found["result"] is None
        waiting = await a.ask("DELETE", f"/v1/jobs/{ids[-1]}")
        running = await a.ask("DELETE", f"/v1/jobs/{ids[0]}")
        for answer in (waiting, running):
            assert answer.json["state"] == "cancelled", answer.body
            assert answer.json["error"]["code"] == "cancelled"
        await wait_until(lambda: w.engines["e1"].running() >= 2, timeout=20, what="the next one")
        page = (await a.ask("GET", "/v1/jobs?limit=3")).json
        assert [j["id"] for j in page["data"]] == ids[:4:-1] and page["has_more"]
        rest = (await a.ask("GET", f"/v1/jobs?limit=100&after={page['last_id']}")).json
        assert [j["id"] for j in rest["data"]] == ids[4::-1] and not rest["has_more"]
        first = (await a.ask("GET", "/v1/jobs?order=asc&limit=1")).json
        assert first["first_id"] == first["last_id"] == ids[0]


async def test_cancelling_never_takes_an_answer_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a, b = await Site(w, "a").start(), await Site(w, "b").start()
        done = (await a.ask("POST", "/v1/jobs", job(7))).json["id"]
        before = await ended(a, done)
        for site in (a, b):
            again = await site.ask("POST", f"/v1/jobs/{done}/cancel")
            assert (again.status, again.json) == (200, before)
        assert before["state"] == "completed" and before["result"]
        ids = [(await a.ask("POST", "/v1/jobs", job(3_000))).json["id"] for _ in range(8)]
        await wait_until(lambda: w.engines["e1"].running() >= 2, timeout=20, what="running")
        for id in ids:
            for _ in range(2):
                answer = await b.ask("POST", f"/v1/jobs/{id}/cancel")
                assert (answer.status, answer.json["state"]) == (200, "cancelled"), answer.body
        assert (await a.ask("GET", f"/v1/jobs/{ids[0]}")).json["state"] == "cancelled"
        assert (await a.ask("GET", f"/v1/jobs/{done}/cancel")).status == 405


async def test_a_job_is_its_users_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(3, stream=True))).json["id"]
        await ended(a, id)
        never = await a.ask("GET", f"/v1/jobs/{'0' * 32}", key=BOB)
        assert never.status == 404
        for method, path in [
            ("GET", f"/v1/jobs/{id}"), ("DELETE", f"/v1/jobs/{id}"),
            ("POST", f"/v1/jobs/{id}/cancel"),
            ("GET", f"/v1/jobs/{id}/events"), ("GET", f"/v1/jobs/{id}?user=alice"),
            ("GET", "/v1/jobs/..%2f"), ("GET", "/v1/jobs/*/events"),
        ]:  # fmt: skip
            other = await a.ask(method, path, key=BOB)
            assert (other.status, other.body) == (404, never.body), (method, path)
        assert (await a.ask("GET", "/v1/jobs", key=BOB)).json["data"] == []
        assert (await a.ask("GET", f"/v1/jobs?after={id}", key=BOB)).json["data"] == []
        found = (await a.ask("GET", f"/v1/jobs/{id}")).json
        assert (found["state"], found["status_code"], found["result"]) == ("completed", 200, None)
        assert (await a.ask("GET", f"/v1/jobs/{id}", key="sk-nobodys")).status == 401


async def test_the_same_key_is_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        again = {"idempotency-key": "once"}
        ids = {
            (await a.ask("POST", "/v1/jobs", job(5), headers=again)).json["id"],
            (await a.ask("POST", "/v1/jobs", job(5, idempotency_key="once"))).json["id"],
        }
        assert len(ids) == 1
        await ended(a, ids.pop())
        other = await a.ask("POST", "/v1/jobs", job(6), headers=again)
        assert (other.status, other.json["error"]["code"]) == (409, "idempotency_key_reused")
        both = await a.ask("POST", "/v1/jobs", job(5, idempotency_key="x"), headers=again)
        assert both.status == 400
        bobs = await a.ask("POST", "/v1/jobs", job(5), headers=again, key=BOB)
        assert bobs.status == 202
        (mine,) = (await a.ask("GET", "/v1/jobs")).json["data"]
        (his,) = (await a.ask("GET", "/v1/jobs", key=BOB)).json["data"]
        assert his["id"] == bobs.json["id"] != mine["id"]


async def test_a_user_may_have_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a", user_jobs_max=2).start()
        answers = [await a.ask("POST", "/v1/jobs", job(4_000)) for _ in range(12)]
        full = [e for e in answers if e.status != 202]
        assert full and all(e.status == 429 for e in full)
        assert 1 <= int(full[0].headers["retry-after"]) <= 60
        listed = (await a.ask("GET", "/v1/jobs")).json["data"]
        assert len(listed) == 12 - len(full), "nothing stays of those that were refused"
        bobs = await a.ask("POST", "/v1/jobs", job(4, **{"class": "batch"}), key=BOB)
        assert bobs.json["class"] == "standard", "he may not use batch"


async def test_what_an_engine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        asked = job(5)
        asked["body"]["temperature"] = -1
        id = (await a.ask("POST", "/v1/jobs", asked)).json["id"]
        found = await ended(a, id)
        assert found["state"] == "failed" and found["status_code"] == 400
        assert found["error"]["param"] == "temperature" and found["result"] is None
        told = (await a.ask("GET", f"/v1/jobs/{id}/events")).body
        assert b"event: error\n" in told and b"event: end\n" not in told
        assert b"temperature must be non-negative" in told


async def test_a_result_as_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(9))).json["id"]
        told = events((await a.ask("GET", f"/v1/jobs/{id}/events")).body).split(b"\n\n")
        result, end, nothing = told
        assert nothing == b"" and b"event: result\n" in result and b"event: end\n" in end
        body = json.loads(result.partition(b"data: ")[2])
        assert body == (await ended(a, id))["result"]
        last = result.partition(b"\n")[0].removeprefix(b"id: ").decode()
        again = await a.ask("GET", f"/v1/jobs/{id}/events", headers={"last-event-id": last})
        assert events(again.body) == end + b"\n\n"


async def follow(site: Site, path: str, pause_s: float = 0, **headers: str) -> bytes:
    async with site.open(path, headers=headers) as e:
        if pause_s:
            await pass_time(pause_s)
        await e.until_over(600)
        assert e.status == 200 and e.complete
        return e.body


async def test_readers_of_all_replicas_get_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        sites = [await Site(w, f"g{n}").start() for n in range(3)]
        id = (await sites[0].ask("POST", "/v1/jobs", job(400, stream=True))).json["id"]
        path = f"/v1/jobs/{id}/events"
        early = asyncio.ensure_future(follow(sites[0], path))
        slow = sites[1].open(path, reads=False)
        async with slow, sites[2].open(path) as cut:
            await cut.until(b'"content":')
            await pass_time(2)
            await sites[2].process.kill()
            had = cut.body
            slow.read_all()
            await pass_time(60)
            late = await follow(sites[1], path)
            whole = events(await early)
            await slow.until_over(600)
            assert events(slow.body) == events(late) == whole
            assert whole.count(b'"content"') >= 400 and b"data: [DONE]\n\n" in whole
            assert b"event: end\n" in whole and whole.count(b"id: ") == whole.count(b"\n\n")
            # One that was cut off goes on with another replica.
            complete = had[: had.rindex(b"\n\n") + 2]
            last = [x[4:] for x in complete.split(b"\n") if x.startswith(b"id: ")][-1].decode()
            rest = events(await follow(sites[1], path, **{"last-event-id": last}))
            assert events(complete) + rest == whole and rest
            for at in range(0, whole.count(b"id: "), 7):
                ids = [x[4:].decode() for x in whole.split(b"\n") if x.startswith(b"id: ")]
                got = await sites[0].ask("GET", f"{path}?last_event_id={ids[at]}")
                if at + 1 < len(ids):
                    assert events(got.body) == whole[whole.index(f"id: {ids[at + 1]}\n".encode()) :]
            done = await sites[0].ask("GET", path, headers={"last-event-id": ids[-1]})
            assert done.status == 204 and done.body == b""


@pytest.mark.parametrize("id", ["x", "1-1", "1-1.", "01-1.1", "1-1.1x", "9" * 70, "-1-1.0"])
async def test_an_id_that_is_none(monkeypatch: pytest.MonkeyPatch, id: str) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        job_id = (await a.ask("POST", "/v1/jobs", job(3, stream=True))).json["id"]
        await ended(a, job_id)
        for one in (id, "9999999999999-1.1"):
            answer = await a.ask("GET", f"/v1/jobs/{job_id}/events", headers={"last-event-id": one})
            assert (answer.status, answer.json["error"]["param"]) == (400, "Last-Event-ID")


async def test_comments_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        for _ in range(8):
            id = (await a.ask("POST", "/v1/jobs", job(2_000, stream=True))).json["id"]
        await pass_time(3)
        async with a.open(f"/v1/jobs/{id}/events") as e:
            await pass_time(40)
            lines = [x for x in e.body.split(b"\n\n") if x]
            assert all(x.startswith(b": queued position=") for x in lines), lines
            times = [t for t, data in e.pieces if data]
            assert 3 <= len(lines) <= 4 and times[1] - times[0] == pytest.approx(15, abs=1.5)


async def test_redis_is_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(600, stream=True))).json["id"]
        async with a.open(f"/v1/jobs/{id}/events") as e:
            await e.until(b'"content":')
            await _outage(w, 3)
            refused = await a.ask("GET", f"/v1/jobs/{id}")
            assert refused.status in (200, 503)
            await e.until_over(600)
            whole = events((await a.ask("GET", f"/v1/jobs/{id}/events")).body)
            last = whole[whole.rindex(b"event: restart") :] if b"restart" in whole else whole
            assert events(e.body).endswith(last[-2_000:]) and b"event: end\n" in e.body


async def test_redis_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(60_000, stream=True))).json["id"]
        async with a.open(f"/v1/jobs/{id}/events") as e:
            await e.until(b'"content":')
            outage = asyncio.ensure_future(_outage(w, 200))
            await pass_time(60)
            assert not e.over and e.body.endswith(b": waiting\n\n")
            await pass_time(70)
            assert e.over and e.complete and b"event: interrupted\n" in e.body
            assert b"event: end\n" not in e.body
            await outage


async def _outage(w: World, seconds: float) -> None:
    w.server.connected = False
    for process, _ in [*w.dispatchers, *w.gateways]:
        await process.broker.link.close()
    await pass_time(seconds)
    w.server.connected = True
    for process, _ in [*w.dispatchers, *w.gateways]:
        await process.broker.up.wait()


async def test_a_dispatcher_dies_within_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}, dispatchers=2) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(300, stream=True))).json["id"]
        async with a.open(f"/v1/jobs/{id}/events") as e:
            await e.until(b'"content":')
            await pass_time(1)
            leads = w.leader()
            await next(p for p, one in w.dispatchers if one is leads).kill()
            await e.until_over(600)
        begun, _, again = events(e.body).partition(b"event: restart\n")
        assert begun.count(b'"content":') > 5 and again.count(b'"content":') >= 300
        assert b"[DONE]" not in begun and b"[DONE]" in again and b"event: end\n" in again
        first = begun.split(b"\n")[0].removeprefix(b"id: ").decode()
        resumed = await a.ask("GET", f"/v1/jobs/{id}/events?last_event_id={first}")
        assert events(resumed.body) == events(e.body).partition(b"\n\n")[2]


async def test_a_gateway_that_ends_interrupts_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a", drain_s=1.0).start()
        id = (await a.ask("POST", "/v1/jobs", job(4_000, stream=True))).json["id"]
        async with a.open(f"/v1/jobs/{id}/events") as e:
            await e.until(b'"content":')
            await a.gateway.drain()
            await e.until_over(10)
            assert e.complete and b"event: interrupted\n" in e.body.rpartition(b"\n\n")[0]
        b = await Site(w, "b").start()
        assert (await b.ask("GET", f"/v1/jobs/{id}")).json["state"] == "running"


async def test_a_reader_that_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        id = (await a.ask("POST", "/v1/jobs", job(300, stream=True))).json["id"]
        gone: Exchange
        async with a.open(f"/v1/jobs/{id}/events") as gone:
            await gone.until(b'"content":')
            gone.leave()
            await wait_until(lambda: gone.over, timeout=3, what="noticed")
        assert a.gateway.follow.open == 0
        assert (await ended(a, id))["state"] == "completed"


async def test_readers_cost_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher says as much, and as soon, whether one reads, or thirty and some that do not
    take what they are sent."""
    took: list[tuple[float, int]] = []
    for readers in (1, 30):
        async with world(monkeypatch, {"e1": engine()}) as w:
            a = await Site(w, "a").start()
            id = (await a.ask("POST", "/v1/jobs", job(500, stream=True))).json["id"]
            since = asyncio.get_running_loop().time()
            link, said = w.dispatchers[0][0].broker.link, 0
            execute = link.execute

            async def counted(args: Any, execute: Any = execute, id: str = id) -> Any:
                nonlocal said
                said += id in args
                return await execute(args)

            link.execute = counted  # type: ignore[method-assign]
            path = f"/v1/jobs/{id}/events"
            stuck = [a.open(path, reads=False) for _ in range(readers // 3)]
            for one in stuck:
                await one.__aenter__()
            reading = [asyncio.ensure_future(follow(a, path)) for _ in range(readers)]
            assert len({events(body) for body in await asyncio.gather(*reading)}) == 1
            took.append((asyncio.get_running_loop().time() - since, said))
            for one in stuck:
                await one.__aexit__(None, None, None)
    (alone_s, alone), (together_s, together) = took
    assert together_s == pytest.approx(alone_s, rel=0.1)
    assert together == pytest.approx(alone, rel=0.1) and alone > 50
