"""The commands that talk to a gateway, as processes against a whole Fairlane in one process."""

import hashlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.support.processes import FAIRLANE, Role, environment
from tests.support.wait import wait_until_sync

pytestmark = pytest.mark.processes
DONE_S = 90


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Role]:
    folder = tmp_path_factory.mktemp("up")
    config = folder / "fairlane.toml"
    (folder / "store").mkdir()
    config.write_text(f'[store]\nurl = "file://{folder / "store"}"\n')
    role = Role("up", ["up", "--port", "0", "--config", str(config)], folder)
    role.start()
    try:
        role.wait_ready("/readyz")
        yield role
    finally:
        role.close()


def command(up: Role, *args: str) -> "subprocess.CompletedProcess[str]":
    env = {**environment(), "FAIRLANE_API_URL": up.url, "COLUMNS": "60"}
    return subprocess.run(
        [str(FAIRLANE), *args], env=env, capture_output=True, text=True, timeout=DONE_S
    )


def lines(n: int, **more: object) -> str:
    return "".join(
        json.dumps(
            {
                "custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions",
                "body": {
                    "model": "sim", "max_tokens": 5, **more,
                    "messages": [{"role": "user", "content": f"{i}"}],
                },
            }
        ) + "\n"
        for i in range(n)
    )  # fmt: skip


def custom_ids(path: Path) -> list[str]:
    return sorted(json.loads(line)["custom_id"] for line in path.read_text().splitlines())


def test_a_batch_from_file_to_file(up: Role, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(30))
    done = command(up, "batch", "run", str(source), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert custom_ids(out) == sorted(f"r{i}" for i in range(30))
    assert "30 of 30 lines answered" in done.stderr
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("out")] == ["out.jsonl"]
    assert httpx.get(f"{up.url}/v1/files", trust_env=False).json()["data"] == []


def test_lines_that_fail(up: Role, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(2) + lines(3, max_tokens=-1).replace('"r', '"bad'))
    done = command(up, "batch", "run", str(source), "--out", str(out))
    assert done.returncode == 1, done.stderr
    assert custom_ids(out) == ["r0", "r1"]
    assert custom_ids(tmp_path / "out.jsonl.errors") == ["bad0", "bad1", "bad2"]


def test_places_that_cannot_be_written(up: Role, tmp_path: Path) -> None:
    """Told in one line, before anything is sent; the input stays as it is."""
    source = tmp_path / "in.jsonl"
    source.write_text(lines(2))
    for out, errors in (
        ("in.jsonl", "e"), ("out", "in.jsonl"), ("out", "out"), ("no/out", "e"), ("out", "no/e"),
        ("out", "out.run"), ("out", "/dev/null"),
    ):  # fmt: skip
        args = ["--out", str(tmp_path / out), "--errors", str(tmp_path / errors)]
        done = command(up, "batch", "run", str(source), *args)
        assert done.returncode == 2 and "uploading" not in done.stderr, done.stderr
        assert done.stderr.startswith("Error: ") and "Traceback" not in done.stderr
        assert source.read_text() == lines(2) and list(tmp_path.iterdir()) == [source]


def test_answers_of_a_run_before_are_not_left(up: Role, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    for text, found in (
        (lines(1) + lines(1, max_tokens=-1).replace('"r', '"bad'), {"out", "out.errors"}),
        (lines(1), {"out"}),
        (lines(1, model="none"), set()),
    ):
        source.write_text(text)
        command(up, "batch", "run", str(source), "--out", str(out), "--overwrite")
        assert {p.name for p in tmp_path.iterdir()} == {"in.jsonl", *found}


def test_a_batch_that_is_gone(up: Role, tmp_path: Path) -> None:
    """As behind an embedded broker that was started again: it is said how to begin anew."""
    source, out, note = tmp_path / "in.jsonl", tmp_path / "out", tmp_path / "out.run"
    source.write_text(lines(1))
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    known = {"url": up.url, "digest": digest, "file": f"file-{0:044x}"}
    for batch in ("", f"batch_{0:032x}"):
        note.write_text(json.dumps(known | {"batch": batch}))
        done = command(up, "batch", "run", str(source), "--out", str(out))
        assert done.returncode == 2 and f"{note}: remove that" in done.stderr, done.stderr


def test_input_that_is_none(up: Role, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("no json\n")
    done = command(up, "batch", "run", str(source), "--out", str(out))
    assert done.returncode == 2 and "has no `url`" in done.stderr
    source.write_text(lines(1) + "no json\n")
    done = command(up, "batch", "run", str(source), "--out", str(out))
    assert done.returncode == 1 and "line 2" in done.stderr and "Traceback" not in done.stderr


def test_a_run_that_was_killed_is_taken_up_again(up: Role, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines(200, max_tokens=30))
    env = {**environment(), "FAIRLANE_API_URL": up.url}
    args = [str(FAIRLANE), "batch", "run", str(source), "--out", str(out)]
    first = subprocess.Popen(args, env=env, stderr=subprocess.DEVNULL)
    note = tmp_path / "out.jsonl.run"
    wait_until_sync(
        lambda: note.exists() and '"batch":"batch' in note.read_text(), timeout=30, what="begun"
    )
    second = command(up, *args[1:])
    assert second.returncode == 2 and "in hand" in second.stderr
    first.kill()
    first.wait(10)
    batches = httpx.get(f"{up.url}/v1/batches", trust_env=False).json()["data"]
    done = command(up, "batch", "run", str(source), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert len(httpx.get(f"{up.url}/v1/batches", trust_env=False).json()["data"]) == len(batches)
    assert custom_ids(out) == sorted(f"r{i}" for i in range(200))
    assert not note.exists()


def test_another_input_under_the_same_name(up: Role, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    note = tmp_path / "out.jsonl.run"
    note.write_text(json.dumps({"url": up.url, "digest": "0" * 64}))
    source.write_text(lines(1))
    done = command(up, "batch", "run", str(source), "--out", str(out))
    assert done.returncode == 2 and "another input" in done.stderr


def test_jobs(up: Role) -> None:
    body = {
        "model": "sim", "stream": True, "max_tokens": 30,
        "messages": [{"role": "user", "content": "hello"}],
    }  # fmt: skip
    asked = {"path": "/v1/chat/completions", "body": body}
    made = httpx.post(f"{up.url}/v1/jobs", json=asked, trust_env=False).json()
    followed = command(up, "jobs", "follow", made["id"])
    raw = command(up, "jobs", "follow", "--raw", made["id"])
    assert followed.returncode == raw.returncode == 0, followed.stderr + raw.stderr
    assert followed.stdout.strip() == _text(raw.stdout).strip() != ""
    assert raw.stdout.endswith("\n\n") and "event: end" in raw.stdout
    plain = ["jobs", "ls"]  # in a pipe: `grep completed` finds the job
    wait_until_sync(
        lambda: any(
            made["id"] in line and "completed" in line
            for line in command(up, *plain).stdout.splitlines()
        ),
        timeout=20, what="the job among those that have ended",
    )  # fmt: skip
    assert made["id"] in command(up, "jobs", "ls", "--url", f"{up.url}/v1").stdout
    shown = json.loads(command(up, "jobs", "show", made["id"]).stdout)
    assert shown["state"] == "completed" and shown["usage"]["output_tokens"] == 30
    stopped = command(up, "jobs", "cancel", made["id"])
    assert stopped.stdout == f"{made['id']}: completed, as it had ended\n"
    assert json.loads(command(up, "jobs", "show", made["id"]).stdout) == shown
    other = httpx.post(
        f"{up.url}/v1/jobs", json={**asked, "body": {**body, "max_tokens": 4_000}}, trust_env=False
    ).json()["id"]
    assert command(up, "jobs", "cancel", other).stdout.startswith(f"{other}: cancelled\n")
    gone = command(up, "jobs", "show", "0" * 32)
    assert gone.returncode == 2 and "no such job" in gone.stderr


def _text(raw: str) -> str:
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    return "".join(c["delta"].get("content") or "" for e in events for c in e.get("choices", ()))


@pytest.mark.parametrize(
    "args",
    [
        ["jobs", "ls"], ["jobs", "show", "x"], ["jobs", "follow", "x"],
        ["jobs", "show", "a\nb"], ["jobs", "follow", "a\nb"], ["jobs", "cancel", "a\nb"],
        ["jobs", "ls", "--url", "127.0.0.1:9"], ["jobs", "ls", "--url", "http://[x"],
        *(["jobs", "ls", "--key", f"hush{c}hush"] for c in ("ü", "\n")),
    ],
)  # fmt: skip
def test_no_gateway(args: Sequence[str]) -> None:
    env = {**environment(), "FAIRLANE_API_URL": "http://127.0.0.1:9"}
    done = subprocess.run(
        [str(FAIRLANE), *args], env=env, capture_output=True, text=True, timeout=DONE_S
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.startswith("Error: ")
    assert "hush" not in done.stderr
