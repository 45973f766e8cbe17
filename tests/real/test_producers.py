"""The two programs of docs/producers.md, as processes with only Redis between them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Role, environment
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.processes
DOC = Path(__file__).resolve().parents[2] / "docs" / "producers.md"
DONE_S = 60


def program(name: str, folder: Path) -> Path:
    """As it stands in the documentation."""
    (text,) = re.findall(rf"```python {name}\n(.*?)```", DOC.read_text(), re.S)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def test_the_programs_of_the_documentation(redis_server: RedisServer, tmp_path: Path) -> None:
    engine = Role("sim", ["sim", "--port", "0"], tmp_path)
    engine.start()
    try:
        engine.wait_ready("/health")
        args = ["dispatcher", "--redis", redis_server.url, "--backend", engine.url]
        dispatcher = Role("dispatcher", [*args, "--metrics-port", "0"], tmp_path)
        produced = _run(program("producer", tmp_path), redis_server.url, wait=False)
        dispatcher.start()  # the producer waits for somebody to tell of models
        try:
            jobs = _lines(produced)
            assert len(set(jobs)) == 20
            consumed = _run(program("consumer", tmp_path), redis_server.url)
            chapters = {line.split()[0]: int(line.split()[1]) for line in _lines(consumed)}
            assert chapters.keys() == {str(n) for n in range(20)}
            assert all(chapters.values())
            again = _run(program("producer", tmp_path), redis_server.url)
            assert _lines(again) == jobs, "the same keys are the same jobs"
        finally:
            dispatcher.close()
    finally:
        engine.close()


def _run(path: Path, url: str, *, wait: bool = True) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, str(path)],
        env={**environment(), "REDIS_URL": url, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    if wait:
        process.wait(DONE_S)
    return process


def _lines(process: "subprocess.Popen[str]") -> list[str]:
    out, err = process.communicate(timeout=DONE_S)
    assert process.returncode == 0, err
    assert not err
    return out.splitlines()
