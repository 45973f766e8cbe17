"""`/v1/responses`: passed through, and made in the background."""

import asyncio
import json
from typing import Any

import pytest

from sim.settings import EngineSettings
from tests.flow.http import ALICE, BOB, Site
from tests.flow.world import world
from tests.support.asgi import Exchange
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime
PATH = "/v1/responses"


def engine(**more: Any) -> EngineSettings:
    return EngineSettings(model="m1", max_num_seqs=2, step_ms=20, seed=1, **more)


def ask(output: int = 5, **more: Any) -> dict[str, Any]:
    body = {"model": "m1", "input": "hello", "max_output_tokens": output, "ignore_eos": True}
    return body | more


def told(stream: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events; each has its type for name."""
    found = []
    for piece in stream.split(b"\n\n"):
        if piece and not piece.startswith(b":"):
            name, data = piece.split(b"\n")
            found.append(json.loads(data.removeprefix(b"data: ")))
            assert name == b"event: " + found[-1]["type"].encode()
    return found


async def ended(site: Site, id: str) -> dict[str, Any]:
    async def look() -> Any:
        found = (await site.ask("GET", f"{PATH}/{id}")).json
        return found if found["status"] not in ("queued", "in_progress") else None

    return await wait_until(look, timeout=600, what="its end")  # type: ignore[no-any-return]


async def test_passed_through(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        whole = await a.ask("POST", PATH, ask(6, background=False))
        assert whole.status == 200 and whole.json["usage"]["output_tokens"] == 6
        assert whole.json["background"] is False
        stream = told((await a.ask("POST", PATH, ask(6, stream=True))).body)
        assert [e["sequence_number"] for e in stream] == list(range(len(stream)))
        assert stream[-1]["type"] == "response.completed"
        assert (await a.ask("GET", f"{PATH}/{whole.json['id']}")).status == 404
        metrics = (await a.ask("GET", "/metrics")).body
        assert b'outcome="finished"} 2.0' in metrics.replace(b'class="standard",', b"").replace(
            b'model="m1",', b""
        )


async def test_an_engine_that_dies_fails_the_stream_in_its_dialect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        head = [("authorization", f"Bearer {ALICE}")]
        sent = json.dumps(ask(500, stream=True)).encode()
        async with Exchange(a.app, "POST", PATH, sent, head) as e:
            await e.until(b"response.output_text.delta")
            w.engines["e1"].kill()
            await e.until_over(100)
            assert e.complete and told(e.body)[-1]["type"] == "response.failed"
            assert b"[DONE]" not in e.body


async def test_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a, b = await Site(w, "a").start(), await Site(w, "b").start()
        made = (await a.ask("POST", PATH, ask(5, background=True, temperature=0.5))).json
        assert made["status"] in ("queued", "in_progress") and made["object"] == "response"
        assert made["background"] is True and made["temperature"] == 0.5
        found = await ended(b, made["id"])
        assert (found["status"], found["id"]) == ("incomplete", made["id"])
        assert found["background"] is True and found["output"][0]["content"][0]["text"]
        asked = list(w.engines["e1"].log)
        assert asked and not any(b"background" in r.body for r in asked)
        not_streamed = await b.ask("GET", f"{PATH}/{made['id']}?stream=true")
        assert not_streamed.status == 400
        for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/cancel")]:
            other = await b.ask(method, f"{PATH}/{made['id']}{path}", key=BOB)
            assert other.status == 404
            never = f"resp_{'0' * 32}"
            none = await b.ask(method, f"{PATH}/{never}{path}", key=BOB)
            assert other.body == none.body.replace(never.encode(), made["id"].encode())
        assert (await b.ask("POST", f"{PATH}/{made['id']}/cancel")).json["status"] == "incomplete"
        assert (await a.ask("GET", f"/v1/jobs/{made['id'][5:]}")).json["path"] == PATH
        assert (await b.ask("DELETE", f"{PATH}/{made['id']}")).json["deleted"] is True
        assert (await b.ask("GET", f"{PATH}/{made['id']}")).status == 404


async def test_what_the_engine_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        for more in ({}, {"stream": True}):
            sent = ask(5, background=True, temperature=-1, **more)
            made = await a.ask("POST", PATH, sent)
            if more:
                last = told(made.body)[-1]
                assert last["type"] == "response.failed"
                id = last["response"]["id"]
                assert "non-negative" in last["response"]["error"]["message"]
                assert last["response"]["error"]["code"] == "invalid_prompt"
            else:
                id = made.json["id"]
            found = await ended(a, id)
            assert found["status"] == "failed"
            assert "non-negative" in found["error"]["message"]
            assert found["error"]["code"] == "invalid_prompt"


async def test_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        a = await Site(w, "a").start()
        sent = ask(5_000, background=True, stream=True)
        head = [("authorization", f"Bearer {ALICE}")]
        async with Exchange(a.app, "POST", PATH, json.dumps(sent).encode(), head) as e:
            await e.until(b"output_text.delta")
            id = told(e.body[: e.body.index(b"\n\n")])[0]["response"]["id"]
            stopped = (await a.ask("POST", f"{PATH}/{id}/cancel")).json
            assert stopped["status"] == "cancelled" and stopped["error"] is None
            await e.until_over(30)
            assert told(e.body)[-1]["response"]["status"] == "cancelled"
        assert (await a.ask("POST", f"{PATH}/{id}/cancel")).json["status"] == "cancelled"
        await wait_until(lambda: w.engines["e1"].running() == 0, timeout=5, what="aborted")


async def test_followed_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}, dispatchers=2) as w:
        a, b = await Site(w, "a").start(), await Site(w, "b").start()
        sent = ask(200, background=True, stream=True)
        head = [("authorization", f"Bearer {ALICE}")]
        async with Exchange(a.app, "POST", PATH, json.dumps(sent).encode(), head) as e:
            await e.until(b"output_text.delta")
            id = told(e.body[: e.body.index(b"\n\n")])[0]["response"]["id"]
            e.leave()
            await wait_until(lambda: e.over, timeout=3, what="left")
        reading = asyncio.ensure_future(b.ask("GET", f"{PATH}/{id}?stream=true"))
        await pass_time(1)
        assert (await a.ask("GET", f"{PATH}/{id}")).json["status"] == "in_progress"
        leads = w.leader()
        await next(p for p, one in w.dispatchers if one is leads).kill()
        stream = told((await reading).body)
        assert [x["sequence_number"] for x in stream] == list(range(len(stream)))
        kinds = [x["type"] for x in stream]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds.count("response.in_progress") == 2, "it began anew"
        assert kinds[-1] == "response.completed" and kinds.count("response.created") == 1
        assert {x["response"]["id"] for x in stream if "response" in x} == {id}
        for after in (0, 1, 2, 50, len(stream) - 2, len(stream) - 1, len(stream) + 5):
            got = await a.ask("GET", f"{PATH}/{id}?stream=true&starting_after={after}")
            assert told(got.body) == stream[after + 1 :]
        assert (await a.ask("GET", f"{PATH}/{id}?stream=true&starting_after=-1")).status == 400
        found = await ended(a, id)
        assert found == stream[-1]["response"]
