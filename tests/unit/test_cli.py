"""The command: what goes wrong is one clear line on standard error, an exit code, no traceback."""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import CliRunner, Result

from common.settings import Settings
from fairlane import roles
from fairlane.cli import main
from fairlane.reload import Configuration
from tests.support.redis_server import RedisServer, free_port
from tests.support.wait import wait_until

NOWHERE = "redis://:hush@127.0.0.1:1/0"
"""Nothing listens on port 1."""
DEAD = "http://127.0.0.1:1"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from outside, short waiting for Redis, and the log as it was."""
    for name in [n for n in os.environ if n.startswith("FAIRLANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(roles, "START_S", 0.3)
    root, own = logging.getLogger(), logging.getLogger("fairlane")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], root.level, own.level = before


@pytest.fixture
def taken() -> Iterator[str]:
    """A port of 127.0.0.1 that something listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield str(listener.getsockname()[1])


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def complaint(*args: str) -> str:
    """The one line that says why a command does not run."""
    result = run(*args)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    lines = [x for x in result.stderr.splitlines() if " WARNING fairlane.broker: " not in x]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("fairlane: ")
    return lines[0].removeprefix("fairlane: ")


@pytest.mark.parametrize("args", [
    ("gateway", "--redis", NOWHERE, "--port"),
    ("dispatcher", "--redis", NOWHERE, "--backend", DEAD, "--metrics-port"),
    ("dispatcher", "--redis", NOWHERE, "--backend", DEAD, "--port"),
    ("batch-worker", "--redis", NOWHERE, "--port"),
    ("up", "--port"),
    ("sim", "--port"),
], ids=" ".join)  # fmt: skip
def test_a_port_that_is_taken(taken: str, args: tuple[str, ...]) -> None:
    text = complaint(*args, taken)
    assert taken in text
    assert re.search("taken|in use", text)


@pytest.mark.parametrize("role", ["gateway", "dispatcher", "batch-worker"])
def test_no_redis_is_named(role: str) -> None:
    text = complaint(role, "--port", "0", "--backend", DEAD)
    assert text.startswith("no Redis: give --redis URL, or set redis.url or FAIRLANE_REDIS_URL")


@pytest.mark.parametrize("role", ["gateway", "dispatcher", "batch-worker", "up"])
def test_redis_is_not_there(role: str) -> None:
    text = complaint(role, "--port", "0", "--backend", DEAD, "--redis", NOWHERE)
    assert text == "no Redis at redis://…@127.0.0.1:1/0 within 0.3 s"


def test_redis_may_drop_jobs() -> None:
    with RedisServer(config={"maxmemory-policy": "allkeys-lru"}) as server:
        text = complaint("gateway", "--port", "0", "--redis", server.url)
    assert "maxmemory-policy allkeys-lru" in text
    assert "noeviction" in text


@pytest.mark.parametrize(("args", "words"), [
    (["gateway", "--port", "0", "--redis", "http://x"], ["redis.url", "redis://"]),
    (["dispatcher", "--redis", NOWHERE], ["no Redis at"]),
    (["up", "--backend", "gpu1:8000"], ["http://", "gpu1:8000"]),
    (["up", "--backend", "http://gpu1:8000/v1"], ["scheme, host and port alone"]),
    (["gateway", "--host", "0.0.0.0", "--port", "0", "--redis", NOWHERE], ["--insecure", "keys"]),
    (["gateway", "--host", "no such host", "--port", "0", "--redis", NOWHERE], ["no such host"]),
    (["gateway", "--config", "nowhere.toml"], ["cannot read nowhere.toml"]),
])  # fmt: skip
def test_an_option_that_cannot_be_used(args: list[str], words: list[str]) -> None:
    text = complaint(*args)
    assert [w for w in words if w not in text] == []


@pytest.mark.parametrize(("text", "words"), [
    ("[gateway]\nport = \n[redis]", ["fairlane.toml", "line 2"]),
    ("[gateway]\nprot = 1", ["`gateway.prot`", "did you mean `port`?"]),
    ("[gateway]\nport = 70000", ["gateway.port", "65535"]),
])  # fmt: skip
@pytest.mark.parametrize("role", ["up", "gateway", "dispatcher", "check"])
def test_a_file_that_cannot_be_used(tmp_path: Path, role: str, text: str, words: list[str]) -> None:
    path = tmp_path / "fairlane.toml"
    path.write_text(text)
    said = complaint(role, "--config", str(path))
    assert [w for w in words if w not in said] == []


def test_a_variable_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_REDIS_URI", NOWHERE)
    assert "`FAIRLANE_REDIS_URL`" in complaint("gateway")


@pytest.mark.parametrize(("args", "words"), [
    (["gateway", "--prot", "1"], "No such option '?--prot'?.*--port"),
    (["gateway", "--port", "x"], "'x' is not a valid integer"),
    (["gateway", "--port", "65536"], "65536 is not in the range"),
    (["gateway", "--log-level", "LOUD"], "'LOUD' is not one of"),
    (["sim", "--max-num-seqs", "0"], "0 is not in the range"),
    (["fly"], "No such command 'fly'"),
])  # fmt: skip
def test_a_word_that_is_wrong_is_named(args: list[str], words: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert re.search(words, result.stderr)
    assert "Traceback" not in result.output


def test_options_win_over_the_environment(monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    monkeypatch.setenv("FAIRLANE_GATEWAY_PORT", str(free_port()))
    monkeypatch.setenv("FAIRLANE_REDIS_URL", NOWHERE)
    assert taken in complaint("gateway", "--port", taken)
    monkeypatch.setenv("FAIRLANE_GATEWAY_PORT", taken)
    assert taken in complaint("gateway")


def test_a_dispatcher_listens_where_host_and_port_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    async def run_dispatcher(configuration: Configuration) -> None:
        seen.append(configuration.settings)

    monkeypatch.setattr(roles, "run_dispatcher", run_dispatcher)
    assert run("dispatcher", "--host", "0.0.0.0", "--port", "9090").exit_code == 0
    assert run("dispatcher", "--host", "::", "--metrics-port", "0").exit_code == 0
    assert run("dispatcher", "--metrics-host", "::1").exit_code == 0
    listens = [(s.dispatcher.metrics_host, s.dispatcher.metrics_port) for s in seen]
    assert listens == [("0.0.0.0", 9090), ("::", 0), ("::1", None)]


def test_a_batch_worker_listens_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []

    async def run_batch_worker(configuration: Configuration) -> None:
        seen.append(configuration.settings)

    monkeypatch.setattr(roles, "run_batch_worker", run_batch_worker)
    assert run("batch-worker", "--host", "0.0.0.0", "--port", "9091").exit_code == 0
    assert run("batch-worker").exit_code == 0
    listens = [(s.batch.metrics_host, s.batch.metrics_port) for s in seen]
    assert listens == [("0.0.0.0", 9091), ("127.0.0.1", None)]


def test_check_says_what_is_not_well(tmp_path: Path) -> None:
    path = tmp_path / "fairlane.toml"
    store = f'aws_endpoint = "{DEAD}", aws_region = "x", aws_secret_access_key = "hush"'
    path.write_text(
        f'[models.m]\nbackends = [{{ url = "{DEAD}" }}]\n'
        f'[store]\nurl = "s3://b"\noptions = {{ {store}, aws_access_key_id = "hush" }}\n'
    )
    result = run("check", "--config", str(path), "--redis", NOWHERE)
    assert result.exit_code == 1
    assert "FAIL store: " in result.stdout
    assert "FAIL redis: no Redis at redis://…@127.0.0.1:1/0" in result.stdout
    assert f"FAIL {DEAD}/v1/models: no answer (" in result.stdout
    assert "hush" not in result.output


def test_check_says_that_the_directory_of_files_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "fairlane.toml"
    path.write_text(f'[store]\nurl = "file://{tmp_path}/none"\n')
    result = run("check", "--config", str(path), "--redis", NOWHERE)
    assert f"FAIL store: the store's directory is not there: {tmp_path}/none\n" in result.stdout
    (tmp_path / "none").write_text("in the way")
    result = run("check", "--config", str(path), "--redis", NOWHERE)
    assert f"FAIL store: the store's directory is none: {tmp_path}/none\n" in result.stdout


def test_check_counts_every_backend_once(tmp_path: Path) -> None:
    path = tmp_path / "fairlane.toml"
    path.write_text(
        f'[models.m]\nbackends = [{{ url = "{DEAD}" }}, {{ url = "http://127.0.0.1:2" }}]\n'
        f'[models.n]\nbackends = [{{ url = "{DEAD}" }}]\n[[backends]]\nurl = "{DEAD}"\n'
    )
    result = run("check", "--config", str(path), "--redis", NOWHERE)
    assert result.stdout.startswith("configuration: 0 keys, 2 models, 2 backends\n")


class _Pages(BaseHTTPRequestHandler):
    """An engine that serves the model m; of others, `pages` is what is where."""

    pages: ClassVar[dict[str, bytes]] = {"/metrics": b""}

    def do_GET(self) -> None:
        pages = {"/v1/models": b'{"data": [{"id": "m"}]}', **self.pages}
        body = pages.get(self.path, b"")
        self.send_response(200 if self.path in pages else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize(("model", "code"), [("m", 0), ("n", 1)])
def test_check_asks_whether_the_engine_serves_the_model(
    model: str, code: int, tmp_path: Path
) -> None:
    with RedisServer() as server, HTTPServer(("127.0.0.1", 0), _Pages) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{engine.server_port}"
        path = tmp_path / "fairlane.toml"
        path.write_text(f'[models.{model}]\nbackends = [{{ url = "{url}" }}]\n')
        result = run("check", "--config", str(path), "--redis", server.url)
        engine.shutdown()
    assert result.exit_code == code
    assert "ok   redis: answers" in result.stdout and "ok   store: " in result.stdout
    said = "serves m, not n" if code else "serves m"
    assert f"{url}/v1/models: {said}\n" in result.stdout


TRTLLM = b"trtllm_num_requests_waiting 0\n"
SGLANG = b"sglang:num_queue_reqs 0\n"
NOTHING_KNOWN = "ok   {}/metrics: status 200, but nothing of a known engine"


@pytest.mark.parametrize(
    ("engine", "pages", "said"),
    [
        ("auto", {"/metrics": SGLANG}, "ok   {}/metrics: the metrics of a sglang"),
        ("auto", {"/prometheus/metrics": TRTLLM},
         "ok   {}/prometheus/metrics: the metrics of a trtllm"),
        ("auto", {"/metrics": b"x 0\n"}, NOTHING_KNOWN),
        ("vllm", {"/metrics": TRTLLM}, NOTHING_KNOWN),
        ("auto", {}, "FAIL {}/metrics: status 404"),
        ("none", {}, "ok   {}/v1/models: serves m"),
    ],
)  # fmt: skip
def test_check_says_whose_metrics_there_are(
    engine: str, pages: dict[str, bytes], said: str, tmp_path: Path
) -> None:
    handler = type("Pages", (_Pages,), {"pages": pages})
    with RedisServer() as server, HTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{serving.server_port}"
        path = tmp_path / "fairlane.toml"
        path.write_text(f'[models.m]\nbackends = [{{ url = "{url}", engine = "{engine}" }}]\n')
        result = run("check", "--config", str(path), "--redis", server.url)
        serving.shutdown()
    assert said.format(url) + "\n" in result.stdout
    assert result.exit_code == ("FAIL" in said)
    assert engine != "none" or "metrics" not in result.stdout


class _Endless(_Pages):
    """Its metrics page has no end."""

    def do_GET(self) -> None:
        if self.path != "/metrics":
            super().do_GET()
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(b"x 0\n" * 1_000)


def test_check_does_not_read_a_page_without_end(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endless) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{serving.server_port}"
        path = tmp_path / "fairlane.toml"
        path.write_text(f'[models.m]\nbackends = [{{ url = "{url}" }}]\n')
        result = run("check", "--config", str(path))
        serving.shutdown()
    assert f"ok   {url}/v1/models: serves m\n" in result.stdout
    assert f"FAIL {url}/metrics: more than" in result.stdout


def test_check_looks_at_every_source(tmp_path: Path) -> None:
    """A model may wait for a backend; a file must be good, and a name be known."""
    path, more = tmp_path / "fairlane.toml", tmp_path / "backends.json"
    path.write_text(
        f'backends_file = "{more}"\n[models.m]\n'
        '[[backends]]\nurl = "http://localhost:1"\nresolve = true\n'
        '[[backends]]\nurl = "http://no-such.invalid:1"\nresolve = true\n'
    )
    said = run("check", "--config", str(path), "--redis", NOWHERE).stdout
    assert "ok   model m: waits for a backend" in said
    assert f"FAIL file {more}: cannot be read" in said
    assert re.search(r"ok   name localhost: .*(127\.0\.0\.1|::1)", said)
    assert "FAIL name no-such.invalid: cannot be looked up" in said
    more.write_text('[{"uri": "http://gpu"}]')
    said = run("check", "--config", str(path), "--redis", NOWHERE).stdout
    assert "FAIL file" in said and "did you mean `url`?" in said
    more.write_text(f'[{{"url": "{DEAD}"}}]')
    said = run("check", "--config", str(path), "--redis", NOWHERE).stdout
    assert f"ok   file {more}: 1 backends" in said
    assert f"FAIL {DEAD}/v1/models: no answer (" in said


async def test_up_says_what_it_waits_for() -> None:
    said: list[str] = []
    options = {"backends": [{"url": DEAD}], "gateway": {"port": 0}}
    running = asyncio.create_task(roles.run_up(Configuration(None, options), said.append))
    try:
        await wait_until(lambda: said or running.done(), timeout=10)
        assert said, running
        assert said[0].startswith("not ready: ")
        assert DEAD in said[0]
        assert said[0].endswith("; waiting")
        assert len(said) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(running, 10)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
