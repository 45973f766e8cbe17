"""Durable jobs over real gateways, by the official client and by plain HTTP."""

import contextlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import httpx
import openai
import pytest

from common.job_settings import webhook_key
from gateway.webhook import signed
from sim.settings import EngineSettings
from tests.support.fleet import KEY, Fleet
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until_sync

pytestmark = pytest.mark.processes
ENGINE = EngineSettings(max_num_seqs=8, step_ms=10.0)
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("jobs")
    server = RedisServer()
    server.start()
    try:
        with Fleet(
            folder, server, models=["m1"], engine=ENGINE, users=["alice", "bob"],
            more=f'[gateway]\nwebhook_private = true\nwebhook_secret = "{SECRET}"',
        ) as f:  # fmt: skip
            yield f
    finally:
        server.close()


Clients = Callable[..., openai.OpenAI]


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Clients]:
    """Makes the official client of a user, for one of the gateways."""
    with contextlib.ExitStack() as stack:

        def made(gateway: int, user: str = "alice") -> openai.OpenAI:
            http = stack.enter_context(httpx.Client(trust_env=False, timeout=60))
            return openai.OpenAI(
                base_url=f"{fleet.gateways[gateway].url}/v1", api_key=KEY + user,
                http_client=http, max_retries=0,
            )  # fmt: skip

        yield made


def ended(api: openai.OpenAI, id: str) -> Any:
    def look() -> Any:
        found = api.responses.retrieve(id)
        return found if found.status not in ("queued", "in_progress") else None

    return wait_until_sync(look, timeout=60, what="the response")


def test_the_clients_background_flow(fleet: Fleet, client: Clients) -> None:
    fleet.heal()
    one, two, three = (client(n) for n in range(3))
    made = one.responses.create(model="m1", input="hello", background=True, max_output_tokens=20)
    assert made.status in ("queued", "in_progress") and made.background is True
    done = ended(two, made.id)
    assert done.id == made.id and done.status in ("completed", "incomplete") and done.output_text
    whole = one.responses.create(model="m1", input="hello", max_output_tokens=20)
    assert whole.output_text == done.output_text, "the same as in the foreground"

    endless: dict[str, Any] = {"ignore_eos": True}
    long = two.responses.create(
        model="m1", input="hello", background=True, max_output_tokens=3_000, extra_body=endless
    )
    with pytest.raises(openai.NotFoundError):
        client(0, "bob").responses.retrieve(long.id)
    with pytest.raises(openai.NotFoundError):
        client(0, "bob").responses.cancel(long.id)
    assert three.responses.cancel(long.id).status == "cancelled"
    assert one.responses.retrieve(long.id).status == "cancelled"

    seen: list[Any] = []
    with one.responses.create(
        model="m1", input="hi", background=True, stream=True, max_output_tokens=60,
        extra_body=endless,
    ) as stream:  # fmt: skip
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta" and len(seen) > 8:
                break
    id, last = seen[0].response.id, seen[-1].sequence_number
    with two.responses.retrieve(id, stream=True, starting_after=last) as rest:
        seen += list(rest)
    assert [e.sequence_number for e in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert text == three.responses.retrieve(id).output_text
    three.responses.delete(id)
    with pytest.raises(openai.NotFoundError):
        one.responses.retrieve(id)


class Reader(threading.Thread):
    """Follows a job by plain HTTP."""

    def __init__(self, url: str, path: str, *, slowly: bool = False, last: str = "") -> None:
        super().__init__(daemon=True)
        self.url = url + path
        self.slowly = slowly
        self.last = last
        self.got = b""
        self.failed = ""
        self._never = threading.Event()

    def run(self) -> None:
        head = {"authorization": f"Bearer {KEY}alice"}
        if self.last:
            head["last-event-id"] = self.last
        size = 64 if self.slowly else None
        with httpx.Client(trust_env=False, timeout=90) as http:
            try:
                with http.stream("GET", self.url, headers=head) as answer:
                    assert answer.status_code == 200, answer.read()
                    for piece in answer.iter_raw(size):
                        self.got += piece
                        if self.slowly:
                            self._never.wait(0.002)
            except httpx.HTTPError as e:
                self.failed = type(e).__name__

    def events(self) -> bytes:
        """What came, in whole events and without comments."""
        whole = self.got[: self.got.rfind(b"\n\n") + 2]
        return re.sub(rb"(?m)^:.*\n\n", b"", whole)


def streamed(fleet: Fleet, tokens: int) -> str:
    """Submits a stream of so many tokens; the path of its events."""
    body = {
        "model": "m1", "messages": [{"role": "user", "content": "x"}], "stream": True,
        "max_tokens": tokens, "ignore_eos": True,
    }  # fmt: skip
    made = httpx.post(
        f"{fleet.gateways[0].url}/v1/jobs", headers={"authorization": f"Bearer {KEY}alice"},
        json={"path": "/v1/chat/completions", "body": body}, trust_env=False,
    )  # fmt: skip
    assert made.status_code == 202, made.text
    return f"/v1/jobs/{made.json()['id']}/events"


def test_readers_elsewhere_cost_nothing(fleet: Fleet) -> None:
    fleet.heal()
    urls, took = [g.url for g in fleet.gateways], list[float]()
    for others in (0, 30):
        begun = time.perf_counter()
        path = streamed(fleet, 300)
        plain = Reader(urls[0], path)
        joined = [Reader(urls[1 + n % 2], path) for n in range(others)]
        for reader in (plain, *joined):
            reader.start()
        plain.join(60)
        took.append(time.perf_counter() - begun)
        for reader in joined:
            reader.join(60)
            assert reader.events() == plain.events()
        assert b"event: end\n" in plain.events()
    print(f"300 tokens: {took[0]:.2f} s read by one, {took[1]:.2f} s with thirty more elsewhere")
    assert took[1] < 1.5 * took[0]


def test_three_readers_on_three_replicas(fleet: Fleet) -> None:
    fleet.heal()
    urls = [g.url for g in fleet.gateways]
    path = streamed(fleet, 600)
    plain, slow, cut = (
        Reader(urls[0], path),
        Reader(urls[1], path, slowly=True),
        Reader(urls[2], path),
    )
    for reader in (plain, slow, cut):
        reader.start()
    wait_until_sync(lambda: cut.events().count(b"id: ") > 50, timeout=30, what="events")
    fleet.gateways[2].kill()
    cut.join(10)
    assert cut.failed and b"event: end" not in cut.got
    last = re.findall(rb"(?m)^id: (.*)$", cut.events())[-1].decode()
    resumed = Reader(urls[1], path, last=last)
    resumed.start()
    for reader in (plain, slow, resumed):
        reader.join(60)
        assert not reader.failed and not reader.is_alive()
    late = Reader(urls[1], path)
    late.start()
    late.join(30)
    whole = plain.events()
    assert whole.count(b'"content":') >= 600 and b"event: end\n" in whole
    assert slow.events() == late.events() == whole
    assert cut.events() + resumed.events() == whole


class Hook(http.server.BaseHTTPRequestHandler):
    """Notes the webhooks that it takes."""

    got: ClassVar[list[tuple[bytes, dict[str, str]]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.got.append((body, {k.lower(): v for k, v in self.headers.items()}))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_a_webhook_of_a_job_whose_gateway_is_killed(fleet: Fleet) -> None:
    fleet.heal()
    Hook.got.clear()
    body = {
        "model": "m1", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100,
        "ignore_eos": True,
    }  # fmt: skip
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hook) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}/hook"
        asked = {"path": "/v1/chat/completions", "body": body, "webhook": url}
        head = {"authorization": f"Bearer {KEY}alice"}
        made = httpx.post(
            f"{fleet.gateways[0].url}/v1/jobs", json=asked, headers=head, trust_env=False
        )
        assert made.status_code == 202, made.text
        fleet.gateways[0].kill()
        wait_until_sync(lambda: Hook.got, timeout=30, what="the webhook")
        server.shutdown()
        serving.join(10)
    sent, headers = Hook.got[0]
    at = int(headers["webhook-timestamp"])
    assert {k: headers[k] for k in headers if k.startswith("webhook-")} == signed(
        f"msg_{made.json()['id']}", at, sent, [webhook_key(SECRET)]
    )
    assert json.loads(sent)["type"] == "job.completed" and len(Hook.got) == 1
    logs = "".join(role.log() for role in fleet.gateways)
    assert SECRET not in logs and SECRET.removeprefix("whsec_") not in logs
    fleet.heal()
