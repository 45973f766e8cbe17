"""The benchmark runs; what it measures on a busy machine says nothing and is not looked at."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.client import Client, Target
from bench.engine import Engine
from bench.fairness.scenario import engine
from bench.fleet import Cores, simulated
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


def run_part(out: Path, name: str) -> tuple[str, dict[str, Any]]:
    """What one part shows and writes in a quick run."""
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--only", name, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    [part] = json.loads(out.read_text())["parts"]
    assert part["name"] == name
    return done.stdout, part


@pytest.mark.processes
def test_a_quick_run_measures_both_ways_and_writes_what_it_shows(tmp_path: Path) -> None:
    shown, part = run_part(tmp_path / "figures.json", "latency")
    for figure in part["figures"]:
        assert figure["name"] in shown
        assert 0 < figure["direct"] < figure["through"]
        assert figure["value"] == pytest.approx(figure["through"] - figure["direct"])


@pytest.mark.processes
def test_scripts_are_timed_inside_redis_as_more_and_more_wait(tmp_path: Path) -> None:
    shown, part = run_part(tmp_path / "figures.json", "verbs")
    figures = {f["name"]: f["value"] for f in part["figures"]}
    for verb in ("enqueue", "pop", "settle"):
        median, p95 = (figures[f"{verb} at 200 users × 4 jobs, {w}"] for w in ("median", "p95"))
        assert 15 <= median <= p95 < 1e6
    _, heading, *rows = part["notes"]
    assert heading.split() == ["users", "jobs", "enqueue", "pop", "settle"]
    assert [row.split()[:2] for row in rows] == [["10", "40"], ["200", "800"]]
    assert all(row in shown for row in rows)


@pytest.mark.processes
def test_the_cost_of_a_reading_is_measured_on_a_large_page(tmp_path: Path) -> None:
    _, part = run_part(tmp_path / "figures.json", "scrape")
    whole, *parts, _ = (f["value"] for f in part["figures"])
    assert 0 < parts[0] < whole


def run_fairness(out: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """What it shows, and the JSON it writes."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.fairness", "--quick", "--out", str(out), *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((out / "fairness.json").read_text())


@pytest.mark.processes
def test_a_quick_run_shows_that_shares_are_even_through_fairlane_alone(tmp_path: Path) -> None:
    shown, written = run_fairness(tmp_path, "--scenario", "shares")
    [part] = written["parts"]
    figures = {f["name"]: f for f in part["figures"]}
    assert all(name in shown for name in figures)
    ratio = figures["service ratio, large : small"]
    assert ratio["direct"] > 3
    assert 0.5 < ratio["through"] < 2
    assert 1.8 < figures["service ratio, large : small (weights 3:1)"]["through"] < 5
    assert figures["weighted engine tokens, share of direct"]["value"] > 0.3
    assert written["load"] >= 0
    assert set(written["runs"]["shares"]) == {"direct", "Fairlane", "Fairlane, weights 3:1"}
    assert (tmp_path / "shares.svg").read_text().startswith("<svg ")


@pytest.mark.processes
def test_a_server_that_is_there_is_measured_with_keys_of_its_own(tmp_path: Path) -> None:
    with simulated(Cores(None, None), engine(6.0)) as sim:
        words = ["--target", sim.url + "/v1", "--exact", "--key", "k0", "--key", "k1"]
        shown, written = run_fairness(tmp_path, "--scenario", "flood", *words)
    assert set(written["runs"]["flood"]) == {"alone", "Fairlane"}  # no engine was given
    figures = {f["name"]: f["value"] for f in written["parts"][0]["figures"]}
    # This server is first come, first served.
    assert figures["p95 over alone"] > 5
    assert "p95 over alone" in shown
    flood = written["runs"]["flood"]["Fairlane"]["requests"]
    assert sum(r["user"] == "heavy" for r in flood) == 100
