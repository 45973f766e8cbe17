"""Whole batches in virtual time: each line is in the files once, whoever dies."""

import asyncio
from typing import Any

import msgspec
import pytest

from common import keys
from gateway.batches import finish
from sim.settings import EngineSettings
from tests.flow.batch_world import BatchWorld, jsonl, request
from tests.flow.world import World, world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime


def engine(**more: Any) -> EngineSettings:
    return EngineSettings(**{"model": "m1", "max_num_seqs": 8, "step_ms": 20, "seed": 1, **more})


def ids(*numbers: int) -> list[str]:
    return sorted(f"r{n}" for n in numbers)


async def test_a_batch_from_its_file_to_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n) for n in range(40))), output_expires_s=3_600)
        batch = await b.over(about)
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
        assert batch["model"] == "m1" and batch["error_file_id"] is None
        assert b.results(about, batch) == (ids(*range(40)), [])
        line = b.lines(about, batch["output_file_id"])[0]
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 4
        assert batch["usage"]["output_tokens"] == 160
        record = await b.files.find("u", batch["output_file_id"])
        assert record is not None and record.purpose == "batch_output"
        assert record.filename == f"{about.id}_output.jsonl"
        assert record.expires_at == record.created_at + 3_600
        times = [batch[f"{n}_at"] for n in ("created", "in_progress", "finalizing", "completed")]
        assert times == sorted(times)
        await pass_time(1)
        assert await b.left() == []
        assert await b.batches.active(10) == []


async def test_lines_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine refuses, and what cannot be asked for at all, is in the error file."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        bad = request(1, max_tokens=-1)
        refused = request(2, temperature="hot")
        streamed = request(3, stream=True, stream_options={"include_usage": True})
        about = await b.create(jsonl(request(0), bad, refused, streamed))
        batch = await b.over(about)
        assert batch["status"] == "completed"
        output, errors = b.results(about, batch)
        assert output + errors == sorted(output) + sorted(errors)
        assert "r0" in output and "r3" in output and "r1" in errors
        assert batch["request_counts"]["failed"] == len(errors)
        found = next(x for x in b.lines(about, batch["error_file_id"]) if x["custom_id"] == "r1")
        assert found["response"]["status_code"] == 400 and found["error"] is None
        assert found["response"]["body"]["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("content", "codes"),
    [
        (b"", ["empty_file"]),
        (b"{\n", ["invalid_json_line"]),
        (jsonl(request(1), request(2), request(3), request(2)), ["duplicate_custom_id"]),
        (jsonl({**request(1), "url": "/v1/embeddings"}), ["url_mismatch"]),
        (jsonl(request(1), request(2, model="m2")), ["model_mismatch"]),
        (jsonl(request(1, model="m9")), ["model_not_found"]),
        (jsonl({"custom_id": "x"}), ["missing_required_parameter"]),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
async def test_an_input_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, content: bytes, codes: list[str]
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(content)
        batch = await b.over(about, 10)
        assert batch["status"] == "failed" and batch["failed_at"]
        assert [e["code"] for e in batch["errors"]["data"]] == codes
        assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
        assert batch["output_file_id"] is None and batch["error_file_id"] is None
        assert w.engines["e1"].running() == 0


async def test_a_line_that_is_named_twice_is_named_by_its_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """BAT-01."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(request(1), request(2), request(3), request(2)))
        (error,) = (await b.over(about, 10))["errors"]["data"]
        assert (error["code"], error["line"], error["param"]) == (
            "duplicate_custom_id", 4, "custom_id",
        )  # fmt: skip


async def test_files_of_other_editors(monkeypatch: pytest.MonkeyPatch) -> None:
    """BAT-03: byte order mark, CR LF, blank lines, no final newline."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        a, c, d = (jsonl(request(n)).strip() for n in range(3))
        content = b"\xef\xbb\xbf" + a + b"\r\n\r\n" + c + b"\r\n   \t\r\n" + d
        about = await b.create(content)
        batch = await b.over(about)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert b.results(about, batch) == (ids(0, 1, 2), [])


async def test_a_key_may_use_its_own_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(request(1)), models=["m7"])
        batch = await b.over(about, 10)
        assert [e["code"] for e in batch["errors"]["data"]] == ["model_not_found"]


async def test_cancelled_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """BAT-04: 5 fast and 20 slow ones; each is in one file, once."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        fast = [request(n) for n in range(5)]
        slow = [request(n, max_tokens=4_000) for n in range(5, 25)]
        about = await b.create(jsonl(*fast, *slow))

        async def five() -> bool:
            return (await b.state(about)).completed == 5

        await wait_until(five, timeout=30, what="the fast ones")
        assert await b.batches.cancel(about.id) == "cancelling"
        assert (await b.state(about)).times["cancelling_at"]
        batch = await b.over(about, 10)
        assert batch["status"] == "cancelled" and batch["cancelled_at"]
        assert batch["request_counts"] == {"total": 25, "completed": 5, "failed": 20}
        assert b.results(about, batch) == (ids(*range(5)), ids(*range(5, 25)))
        codes = {x["error"]["code"] for x in b.lines(about, batch["error_file_id"])}
        assert codes == {"batch_cancelled"}
        assert w.engines["e1"].running() == 0, "what ran is stopped"
        await pass_time(1)
        assert await b.left() == []


async def test_cancelled_before_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=0)
        about = await b.create(jsonl(request(1)))
        assert await b.batches.cancel(about.id) == "cancelling"
        await b.add_worker()
        batch = await b.over(about, 10)
        assert batch["status"] == "cancelled"
        assert batch["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


async def test_a_cancellation_poisons_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """BAT-07."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(request(1)))
        assert (await b.over(about))["status"] == "completed"
        assert await b.batches.cancel(about.id) == "completed"
        assert await b.batches.cancel("batch_" + "0" * 32) == ""
        again = await b.create(jsonl(request(1)))
        assert (await b.over(again))["status"] == "completed"
        assert (await b.state(about)).status == "completed"


async def test_the_window_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        slow = [request(n, max_tokens=4_000) for n in range(4, 40)]
        about = await b.create(
            jsonl(*(request(n) for n in range(4)), *slow), window_ms=60_000, window="1m"
        )
        batch = await b.over(about, 75)
        assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
        output, errors = b.results(about, batch)
        assert sorted(output + errors) == ids(*range(40)) and "r0" in output
        codes = {x["error"]["code"] for x in b.lines(about, batch["error_file_id"])}
        assert codes == {"batch_expired"}
        await pass_time(1)
        assert await b.left() == []


async def test_lines_that_the_queue_refuses_are_put_there_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user's limit of 10 waiting jobs, and 60 lines."""
    more = {"class": {"batch": {"jobs_max": 10}}}
    async with world(monkeypatch, {"e1": engine()}, model=more) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n) for n in range(60))))
        batch = await b.over(about)
        assert b.results(about, batch) == (ids(*range(60)), [])
        registry = b.workers[0].tools.metrics._lines
        assert registry.labels("full")._value.get() > 0


async def test_the_input_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w, ahead_lines=8).start()
        about = await b.create(jsonl(*(request(n, max_tokens=50) for n in range(60))))
        await _some(b, about, 1)
        assert await b.files.delete("u", about.input_file_id)
        batch = await b.over(about, 60)
        assert batch["status"] == "failed"
        assert batch["errors"]["data"][0]["code"] == "input_file_not_found"
        assert len(b.results(about, batch)[0]) == batch["request_counts"]["completed"] > 0


async def test_an_engine_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine(), "e2": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n, max_tokens=100) for n in range(30))))
        await wait_until(lambda: w.engines["e1"].running() > 3, timeout=20, what="they run")
        w.engines["e1"].kill()
        batch = await b.over(about)
        assert b.results(about, batch) == (ids(*range(30)), [])


async def _some(b: BatchWorld, about: Any, n: int) -> None:
    async def done() -> bool:
        return (await b.state(about)).completed >= n

    await wait_until(done, timeout=60, what=f"{n} lines")


async def test_a_worker_dies_and_another_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n, max_tokens=100) for n in range(80))))
        await _some(b, about, 10)
        await b.workers[0].kill()
        await b.add_worker()
        seen = asyncio.get_running_loop().time()
        counted = (await b.state(about)).completed
        await _some(b, about, counted + 1)
        assert asyncio.get_running_loop().time() - seen <= 12
        batch = await b.over(about)
        assert b.results(about, batch) == (ids(*range(80)), [])


async def test_a_dispatcher_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}, dispatchers=2) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n, max_tokens=100) for n in range(60))))
        await _some(b, about, 5)
        leads = w.leader()
        await next(p for p, one in w.dispatchers if one is leads).kill()
        batch = await b.over(about)
        assert b.results(about, batch) == (ids(*range(60)), [])


async def test_redis_forgets_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that Redis lost, with all that tells of them, are put there again."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n, max_tokens=200) for n in range(60))))
        await _some(b, about, 1)
        await _forget_jobs(w, b)
        batch = await b.over(about)
        assert b.results(about, batch) == (ids(*range(60)), [])


async def _forget_jobs(w: World, b: BatchWorld) -> None:
    k = b.workers[0].tools.queues.of("m1").keys
    names = [n.decode() for n in await b.broker.command("KEYS", k.prefix + "*")]
    await b.broker.command("DEL", *(n for n in names if n != k.board))


async def test_a_tail_in_no_list_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs have ended, and Redis lost the list that tells so."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=0)
        about = await b.create(jsonl(*(request(n) for n in range(6))))
        worker = await b.add_worker()
        sink = worker.tools.queues.of("m1").keys.ended(about.sink)

        async def ended() -> bool:
            return int(await b.broker.command("LLEN", sink)) >= 2

        await wait_until(ended, timeout=30, what="two have ended")
        await b.broker.command("DEL", sink)
        batch = await b.over(about, 60)
        assert b.results(about, batch) == (ids(*range(6)), [])


async def test_near_its_end_a_batch_goes_in_the_keys_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind a flood of standard requests, batch would get its floor share alone."""
    async with world(monkeypatch, {"e1": engine(max_num_seqs=4)}) as w:
        b = await BatchWorld(w, escalate_at=0.25).start()
        for n in range(400):
            await w.ask(f"other{n % 2}", output=100, stream=False, text=f"flood {n}")
        about = await b.create(
            jsonl(*(request(n, max_tokens=10) for n in range(40))), window_ms=120_000
        )
        batch = await b.over(about, 120)
        assert batch["status"] == "completed"
        assert b.results(about, batch) == (ids(*range(40)), [])


async def test_two_workers_never_run_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start(workers=3)
        abouts = [await b.create(jsonl(*(request(n) for n in range(20)))) for _ in range(4)]
        for about in abouts:
            assert b.results(about, await b.over(about)) == (ids(*range(20)), [])
        assert await b.broker.command("ZCARD", keys.BATCHES) == 0
        lost = [x.tools.metrics._failed.labels("lost")._value.get() for x in b.workers]
        assert lost == [0, 0, 0]


async def test_a_model_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After everything was started anew, a worker may be there before the engines' models are."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        models = b.workers[0].tools.models
        await wait_until(lambda: models.ready, timeout=30, what="an engine answers")
        w.engines["e1"].kill()
        await wait_until(lambda: not models.ready, timeout=60, what="no engine answers")
        about = await b.create(jsonl(request(1, model="m9")))
        await pass_time(20)
        assert (await b.state(about)).status == "validating"
        batch = await b.over(about, 60)
        assert [e["code"] for e in batch["errors"]["data"]] == ["model_not_found"]


async def test_what_batches_left_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that Redis forgot, and of one that is over; not of one that runs."""
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        tools = b.workers[0].tools
        runs = await b.create(jsonl(request(1, max_tokens=4_000)))
        over = await b.create(jsonl(request(2)))
        await b.over(over)
        for hex in ("cd" * 16, over.hex):
            b.objects[f"batches/{hex}/index"] = b""
        assert await finish.sweep(tools, "") == ""
        assert {n for n in b.objects if n.startswith("batches/")} == {f"batches/{runs.hex}/index"}


async def test_others_find_a_place_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines take at most half of the queue's room, so that others find a place."""
    async with world(monkeypatch, {"e1": engine(max_num_seqs=1)}) as w:
        gateway = msgspec.structs.replace(w.settings.gateway, model_jobs_max=20)
        w.settings = msgspec.structs.replace(w.settings, gateway=gateway)
        b = await BatchWorld(w).start()
        about = await b.create(jsonl(*(request(n, max_tokens=40) for n in range(30))))
        k = b.workers[0].tools.queues.of("m1").keys
        most = 0
        while not (await b.state(about)).over:
            most = max(most, int(await b.broker.command("ZCARD", k.deadlines)))
            await pass_time(0.1)
        assert 5 <= most <= 10
        assert (await b.state(about)).completed == 30


@pytest.mark.parametrize(
    ("endpoint", "body", "answer"),
    [
        ("/v1/completions", {"prompt": "once", "max_tokens": 4}, "text_completion"),
        ("/v1/embeddings", {"input": ["a", "b"]}, "list"),
        (
            "/v1/responses",
            {"input": "hello", "max_output_tokens": 4, "background": True, "stream": True},
            "response",
        ),
    ],
)
async def test_every_endpoint(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, body: dict[str, Any], answer: str
) -> None:
    async with world(monkeypatch, {"e1": engine()}) as w:
        b = await BatchWorld(w).start()
        line = {"custom_id": "r1", "method": "POST", "url": endpoint}
        content = jsonl({**line, "body": {"model": "m1", **body}})
        about = await b.create(content, endpoint=endpoint)
        batch = await b.over(about, 60)
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}, batch
        (found,) = b.lines(about, batch["output_file_id"])
        assert found["response"]["body"]["object"] == answer
