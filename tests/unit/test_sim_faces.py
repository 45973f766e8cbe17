"""The simulated engine as TGI and as SGLang: metrics, lists of models, refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dispatcher.engines.facts import NOTHING, EngineFacts, TokenTimes
from dispatcher.engines.kinds import ADAPTERS, busy, recognise
from sim.engine import Engine
from sim.events import EngineRequest
from sim.metrics import render
from sim.settings import EngineSettings, Face
from sim.transport import EngineTransport

FIXTURES = Path(__file__).parent.parent / "fixtures"
CHAT = "/v1/chat/completions"
OTHERS: list[Face] = ["tgi", "sglang"]


def busy_engine(engine: Face, labels: int = 1) -> tuple[EngineSettings, Engine]:
    """Two running, three waiting, one complete, and some steps behind it."""
    settings = EngineSettings(model="tiny", engine=engine, max_num_seqs=2, engine_labels=labels)
    made = Engine(settings)
    made.submit(0.0, EngineRequest(prompt_tokens=10, output_tokens=5))
    made.advance(1.0)
    for _ in range(5):
        made.submit(1.0, EngineRequest(prompt_tokens=10, output_tokens=100))
    made.advance(1.5)
    return settings, made


def page_of(engine: Face, labels: int = 1) -> bytes:
    settings, made = busy_engine(engine, labels)
    return render(settings, made.stats, made.gauges(), 1_000.0)


def label_names(page: str) -> dict[str, set[frozenset[tuple[str, str]]]]:
    """The labels of each series, without the bounds of buckets and the number of the rank."""
    found: dict[str, set[frozenset[tuple[str, str]]]] = {}
    for family in text_string_to_metric_families(page):
        for s in family.samples:
            of_rank = {"dp_rank", "tp_rank", "priority"}
            kept = {(k, "" if k in of_rank | {"le"} else v) for k, v in s.labels.items()}
            found.setdefault(s.name, set()).add(frozenset(kept))
    return found


@pytest.mark.parametrize("engine", OTHERS)
def test_names_labels_and_descriptions_are_the_engine_s(engine: Face) -> None:
    written = (FIXTURES / engine / "metrics.txt").read_text()
    ours = page_of(engine).decode()
    heads = [line for line in ours.splitlines() if line.startswith("#")]
    assert heads and set(heads) <= set(written.splitlines())
    theirs = label_names(written)
    for name, labels in label_names(ours).items():
        assert labels <= theirs[name], name


def test_data_parallel_ranks_are_labelled_as_by_sglang() -> None:
    written = label_names((FIXTURES / "sglang" / "metrics_ranks_priority.txt").read_text())
    ours = label_names(page_of("sglang", labels=2).decode())
    without = {frozenset(p for p in s if p[0] != "priority") for s in written["sglang:token_usage"]}
    assert ours["sglang:token_usage"] == without


@pytest.mark.parametrize("labels", [1, 3])
def test_sglang_s_page_is_recognised_and_tells_the_engine_s_state(labels: int) -> None:
    _, made = busy_engine("sglang")
    page, gaps = page_of("sglang", labels), made.stats.inter_token
    assert recognise(page) == "sglang"
    assert ADAPTERS["sglang"].read(page, "tiny") == EngineFacts(
        waiting=3, running=2, kv=made.kv_usage(), preemptions=0,
        tpot=TokenTimes(gaps.total, gaps.count), generated=made.stats.generation_tokens,
    )  # fmt: skip


def test_tgi_s_page_is_recognised_and_tells_the_engine_s_state() -> None:
    settings, made = busy_engine("tgi")
    page, stats = page_of("tgi"), made.stats
    assert recognise(page) == "tgi"
    assert stats.steps > 40 and stats.time_per_output_token.count == 1
    assert ADAPTERS["tgi"].read(page, "tiny") == EngineFacts(
        waiting=3, running=2, tpot=TokenTimes(stats.time_per_output_token.total, 1),
        generated=stats.ttft.count + stats.steps,
    )  # fmt: skip
    assert ADAPTERS["tgi"].read(render(settings, stats, None, 0.0), None) == NOTHING


async def call(transport: EngineTransport, n: int, *, stream: bool) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"{n}"}], "stream": stream,
            "max_tokens": 30, "ignore_eos": True}  # fmt: skip
    client = httpx.AsyncClient(transport=transport, base_url="http://e", timeout=None)
    return await client.post(CHAT, json=body)  # closing it would break all others of the engine


@pytest.mark.looptime
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("engine", "status"), [("vllm", 503), ("tgi", 429), ("sglang", 503)])
async def test_a_full_queue_is_refused_as_by_the_engine(
    engine: Face, status: int, stream: bool
) -> None:
    transport = EngineTransport(
        EngineSettings(model="tiny", engine=engine, max_num_seqs=1, max_num_queued_reqs=1)
    )
    answers = await asyncio.gather(*(call(transport, n, stream=stream) for n in range(3)))
    refused = answers[2]
    head_is_sent = stream and engine != "vllm"
    assert [a.status_code for a in answers] == [200, 200, 200 if head_is_sent else status]
    body = refused.content
    if head_is_sent:
        assert refused.headers["content-type"].startswith("text/event-stream")
        body = body.split(b"\n\n")[0].removeprefix(b"data: ")
    assert busy(engine, None if head_is_sent else status, body)
    error = msgspec.json.decode(body)
    if engine == "tgi":
        assert error == {"error": "Model is overloaded", "error_type": "overloaded"}
    elif engine == "sglang":
        error = error["error"] if stream else error
        assert (error["message"], error["code"]) == ("The request queue is full.", 503)


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("engine", "card"),
    [
        ("tgi", {"id": "tiny", "object": "model", "created": 0, "owned_by": "tiny"}),
        ("sglang", {"id": "tiny", "object": "model", "created": 1_795_977_357,
                    "owned_by": "sglang", "root": "tiny", "parent": None, "max_model_len": 8192}),
    ],
)  # fmt: skip
async def test_the_list_of_models_is_the_engine_s(engine: Face, card: dict[str, object]) -> None:
    transport = EngineTransport(EngineSettings(model="tiny", engine=engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://e") as client:
        listed = (await client.get("/v1/models")).json()
    assert listed == {"object": "list", "data": [card]}


@pytest.mark.looptime
@pytest.mark.parametrize(("engine", "status"), [("vllm", 404), ("tgi", 200), ("sglang", 404)])
async def test_tgi_takes_any_name_for_its_model(engine: Face, status: int) -> None:
    transport = EngineTransport(EngineSettings(model="other", engine=engine))
    assert (await call(transport, 0, stream=False)).status_code == status
