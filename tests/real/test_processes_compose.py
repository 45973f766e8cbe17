"""Each service of compose.yaml as a plain process: its command runs, it is healthy, it serves."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import redis

from tests.support.processes import FAIRLANE, Role
from tests.support.redis_server import find_redis_server, free_port
from tests.support.wait import wait_until, wait_until_sync
from tests.test_compose import compose, service_command, service_config

pytestmark = pytest.mark.processes

REDIS = "redis://redis:6379/0"
CONFIG = "/etc/fairlane/fairlane.toml"
PATH = re.compile(r'"http://127\.0\.0\.1:\d+(/\w+)"')
NOT_RUN = {"vllm", "prometheus"}
"""Services whose programs are not Fairlane's, and need an image of their own."""


def role(folder: Path, name: str, substitutions: dict[str, str]) -> Role:
    """A service's process, on a free port of the loopback address."""
    command = service_command(name, {"0.0.0.0": "127.0.0.1", **substitutions})
    assert command[0] == "fairlane"
    return Role(name, command[1:], folder)


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Role]]:
    """All services, healthy by their own health checks; redis first, as they depend on it."""
    folder = tmp_path_factory.mktemp("compose")
    with ExitStack() as stack:
        made: dict[str, Role] = {}

        def start(new: Role) -> None:
            made[new.name] = new
            stack.callback(new.close)
            new.start()

        port = free_port()
        words = service_command("redis", {"redis-server": find_redis_server()})
        words += ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        start(Role("redis", words[1:], folder, program=Path(words[0])))
        wait_until_sync(lambda: _answers(port), timeout=20, what="redis answers")
        for name in ("sim-1", "sim-2"):
            start(role(folder, name, {"9000": "0"}))
        for name in ("sim-1", "sim-2"):
            made[name].wait_ready(health_path(name))
        config = folder / "fairlane.toml"
        config.write_text(
            service_config("", {f"http://{n}:9000": made[n].url for n in ("sim-1", "sim-2")})
        )
        common = {REDIS: f"redis://127.0.0.1:{port}/0", CONFIG: str(config)}
        for name in ("gateway-1", "gateway-2"):
            start(role(folder, name, {**common, "8000": "0"}))
        for name in ("dispatcher-1", "dispatcher-2"):
            start(role(folder, name, {**common, "9090": "0"}))
        for name in ("batch-worker-1", "batch-worker-2"):
            start(role(folder, name, {**common, "9091": "0"}))
        for name in made.keys() - {"redis"}:
            made[name].wait_ready(health_path(name))
        yield made


def _answers(port: int) -> bool:
    try:
        with redis.Redis(port=port, socket_timeout=2) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False


def health_path(name: str) -> str:
    """What the service's health check asks for."""
    found = PATH.search(compose()["services"][name]["healthcheck"]["test"][-1])
    assert found, name
    return found[1]


def test_every_service_runs(services: dict[str, Role]) -> None:
    assert services.keys() == compose()["services"].keys() - NOT_RUN
    assert {name: r.alive() for name, r in services.items()} == dict.fromkeys(services, True)
    assert FAIRLANE.exists()


async def test_each_gateway_serves_the_demo_key(services: dict[str, Role]) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        for name in ("gateway-1", "gateway-2"):
            gateway = services[name]
            await wait_until(lambda g=gateway: g.status("/readyz") == 200, timeout=20)  # type: ignore[misc]
            body = {"model": "sim-small", "messages": [{"role": "user", "content": "Hello"}],
                    "max_tokens": 5}  # fmt: skip
            asked = gateway.url + "/v1/chat/completions"
            for key, status in (("sk-demo-alice", 200), ("sk-demo-eve", 401)):
                headers = {"authorization": f"Bearer {key}"}
                answer = await client.post(asked, json=body, headers=headers)
                assert answer.status_code == status, (name, answer.text)
                if status == 200:
                    assert answer.json()["choices"][0]["message"]["content"]


def test_prometheus_finds_metrics_on_every_service(services: dict[str, Role]) -> None:
    for name in services.keys() - {"redis"}:
        assert services[name].status("/metrics") == 200, name


def test_what_is_told_to_stop_ends_well(services: dict[str, Role]) -> None:
    for name in sorted(services.keys() - {"redis"}):
        assert services[name].stop() == 0, services[name].log()[-2000:]
        assert "Traceback" not in services[name].log(), services[name].log()
