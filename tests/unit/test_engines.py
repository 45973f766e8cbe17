"""Metrics pages: real ones, and what a page may say otherwise."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Gauge
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from dispatcher.engines.facts import EngineFacts, TokenTimes
from dispatcher.engines.kinds import recognise
from dispatcher.engines.vllm import read as read_vllm

PAGES = Path(__file__).resolve().parents[1] / "fixtures" / "vllm-0.32"
W, R, P = "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:num_preemptions_total"
KV, KV_OLD = "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"


def page(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.mark.parametrize("name", sorted(p.stem for p in PAGES.glob("metrics_*.body")))
def test_real_pages(name: str) -> None:
    """As another parser reads them. Each is of one engine, so each name has one series."""
    text = (PAGES / f"{name}.body").read_bytes()
    assert len(text) > 50_000
    assert recognise(text) == "vllm"
    series = {
        s.name: s.value for f in text_string_to_metric_families(text.decode()) for s in f.samples
    }
    gaps = "vllm:inter_token_latency_seconds"
    facts = EngineFacts(
        waiting=int(series[W]),
        running=int(series[R]),
        kv=series[KV],
        preemptions=int(series[P]),
        tpot=TokenTimes(series[f"{gaps}_sum"], int(series[f"{gaps}_count"])),
        generated=int(series["vllm:generation_tokens_total"]),
    )
    for model in ("tiny", None, "another name of tiny"):
        assert read_vllm(text, model) == facts


def test_the_real_pages_show_load_and_none() -> None:
    read = {p.stem: read_vllm(p.read_bytes(), "tiny") for p in PAGES.glob("metrics_*.body")}
    assert len(read) == 6
    assert {(f.waiting, f.running) for f in read.values()} == {(0, 0), (8, 4), (2, 4), (0, 3)}
    assert {f.preemptions for f in read.values()} == {0, 3}


def test_series_of_several_engines_are_summed_and_the_fullest_counts() -> None:
    text = page(
        f'{W}{{engine="0",model_name="m1"}} 0.0',
        f'{W}{{engine="1",model_name="m1"}} 300.0',
        f'{R}{{engine="0",model_name="m1"}} 1.0',
        f'{R}{{engine="1",model_name="m1"}} 64.0',
        f'{KV}{{engine="0",model_name="m1"}} 0.99',
        f'{KV}{{engine="1",model_name="m1"}} 0.02',
        f'{P}{{engine="0",model_name="m1"}} 3.0',
        f'{P}{{engine="1",model_name="m1"}} 4.0',
    )
    assert read_vllm(text, "m1") == EngineFacts(300, 65, 0.99, 7)


T = "vllm:{}_seconds_{}"


@pytest.mark.parametrize(
    ("lines", "tpot"),
    [
        ({"time_per_output_token": (6, 200)}, TokenTimes(6, 200)),
        (
            {"time_per_output_token": (6, 200), "inter_token_latency": (7.5, 300)},
            TokenTimes(7.5, 300),
        ),
        ({"request_time_per_output_token": (0.5, 20)}, TokenTimes(0.5, 20)),
        ({"inter_token_latency": ("NaN", 300)}, None),
        ({"time_to_first_token": (7, 300)}, None),
        ({"inter_token_latency": (0, 0)}, TokenTimes(0, 0)),
    ],
)
def test_time_per_output_token_by_its_names(
    lines: dict[str, tuple[float, int]], tpot: TokenTimes | None
) -> None:
    every = [(T.format(n, "sum"), v[0]) for n, v in lines.items()]
    every += [(T.format(n, "count"), v[1]) for n, v in lines.items()]
    text = page(*(f'{n}{{engine="0"}} {v}' for n, v in every))
    assert read_vllm(text, "m").tpot == tpot
    alone = page(*(f"{n} {v}" for n, v in every if n.endswith("_sum")))
    assert read_vllm(alone, "m") == EngineFacts(), "a sum without its count"


def test_of_old_and_new_name_the_new_one_wins() -> None:
    assert read_vllm(page(f"{KV_OLD} 0.995"), "m").kv == 0.995
    assert read_vllm(page(f"{KV} 0.995"), "m").kv == 0.995
    assert read_vllm(page(f"{KV_OLD} 0", f"{KV} 0.995"), "m").kv == 0.995
    assert read_vllm(page(f"{KV} NaN", f"{KV_OLD} 0.995"), "m").kv == 0.995


def test_only_the_model_s_own_series_count_where_there_are_any() -> None:
    text = page(f'{W}{{model_name="a"}} 1', f'{W}{{model_name="b"}} 2', f'{W}{{x="a"}} 4')
    assert read_vllm(text, "a").waiting == 1
    assert read_vllm(text, "b").waiting == 2
    assert read_vllm(text, "c").waiting == 7
    assert read_vllm(text, None).waiting == 7


@pytest.mark.parametrize(
    "model", ['a"b', "a\\b", "a\nb", "a}b", "a,b", "a b", "ü", 'x",model_name="y']
)
def test_escaped_labels(model: str) -> None:
    """The page is written by the library that vLLM uses."""
    registry = CollectorRegistry()
    gauge = Gauge(W, "Waiting.", ["engine", "model_name"], registry=registry)
    gauge.labels("0", model).set(5)
    gauge.labels("0", "y").set(70)
    text = generate_latest(registry)
    assert read_vllm(text, model).waiting == 5
    assert read_vllm(text, "y").waiting == 70
    assert read_vllm(text, None).waiting == 75


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "+Inf",
        "-1",
        "x",
        "",
        "1_0",
        "1e300",
        '{a="b"',
        "1 2 3",
        "0x10",
        "{} {} 1",
        '{a="b} 1',
    ],
)
def test_an_impossible_value_is_unknown(value: str) -> None:
    text = page(f"{W} {value}", f'{R}{{a="0"}} 5', f'{R}{{a="1"}} {value}', f"{KV} {value}")
    assert read_vllm(text, None) == EngineFacts()


@pytest.mark.parametrize(
    "line",
    [
        f"{W} 3",
        f"{W}\t3 ",
        f"{W} 3 1700000000000",
        f"{W} {{}} 3.0e0",
        f'{W}{{ a = "b" , c="d", }} 3',
        f'{W}{{a="}} 9"}} 3\r',
        f'{W}{{a="b"}} 3 # {{trace_id="x"}} 1.0',
        f"{W} 2.5",
    ],
)
def test_forms_of_a_sample(line: str) -> None:
    assert read_vllm(page(line), None).waiting == 3


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"<html>login</html>\n",
        b'{"detail":"Not Found"}',
        page(f"# HELP {W} 5", f"{W}_by_reason 5", f"x{W} 5", f" {W} 5"),
        f"{W} 1".encode(),  # cut: the line may have gone on
        b"\xff\x00\n" * 100,
        page("sglang:num_queue_reqs 300", "sglang:token_usage 0.99"),
    ],
)
def test_a_page_that_does_not_say_is_unknown_and_not_zero(text: bytes) -> None:
    assert read_vllm(text, "m1") == EngineFacts()


@pytest.mark.parametrize(("said", "read"), [("1.0000001", 1.0), ("1", 1.0), ("99.5", None)])
def test_a_share_is_at_most_one(said: str, read: float | None) -> None:
    assert read_vllm(page(f"{KV} {said}"), None).kv == read


def test_no_line_takes_long() -> None:
    """Labels that end in nothing; a backtracking pattern would not return from these."""
    labels = 'a="x"  ' * 20_000
    assert read_vllm(page(f"{W}{{{labels}", f"{W}{{{'a' * 100_000}"), "m") == EngineFacts()


@given(st.lists(st.sampled_from([W, KV, "{", "}", '"', "\\", "model_name", "=", " ", "\n", "1"])))
def test_garbage_never_raises(parts: list[str]) -> None:
    facts = read_vllm("".join(parts).encode(), "m")
    assert facts.waiting is None or facts.waiting >= 0
