"""The benchmark runs; what it measures on a busy machine says nothing and is not looked at."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.client import Client, Target
from bench.engine import Engine
from bench.load import body
from bench.report import Budget, Figure, Part, percentile, table

ROOT = Path(__file__).resolve().parents[2]


async def test_the_paced_engine_and_the_client_agree_on_every_event() -> None:
    engine = Engine(0.001)
    await engine.start()
    client = Client(Target.of(engine.url))
    try:
        async with asyncio.timeout(10):
            for tokens in (1, 2, 50):
                request = client.target.request(body("sim", stream=True, tokens=tokens))
                answer = await client.ask(request)
                # The role's event, one for each token, the usage, and [DONE].
                assert (answer.status, answer.events) == (200, tokens + 3)
                assert 0 < answer.first_s <= answer.whole_s
            whole = await client.ask(client.target.request(body("sim", stream=False, tokens=3)))
            assert (whole.status, whole.events) == (200, 0)
            assert whole.first_s > 0
        assert engine.tokens == 1 + 2 + 50 + 3
        assert not engine.streams
    finally:
        client.close()
        await engine.close()


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(0.9, "stretch"), (1.5, "met"), (2.1, "missed"), (float("nan"), "missed")],
)
def test_a_figure_is_judged_by_its_budget(value: float, verdict: str) -> None:
    figure = Figure(name="x", unit="ms", value=value, direct=2.0, through=4.0,
                    budget=Budget(2.0, 1.0))  # fmt: skip
    shown = table([Part(name="p", title="t", figures=[figure])])
    assert shown.splitlines()[2].endswith(verdict)
    assert "×2.00" in shown


def test_a_percentile_is_the_nearest_rank() -> None:
    values = list(range(1, 101))
    assert [percentile(values, p) for p in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7.0], 0.01) == 7.0


@pytest.mark.processes
def test_a_quick_run_measures_both_ways_and_writes_what_it_shows(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    words = ["--quick", "--only", "latency", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [part] = json.loads(out.read_text())["parts"]
    assert part["name"] == "latency"
    for figure in part["figures"]:
        assert figure["name"] in done.stdout
        assert 0 < figure["direct"] < figure["through"]
        assert figure["value"] == pytest.approx(figure["through"] - figure["direct"])
