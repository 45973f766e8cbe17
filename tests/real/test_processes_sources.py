"""Real processes: backends that an administrator adds and drains, and files that are read again."""

import asyncio
import contextlib
import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from sim.settings import EngineSettings
from tests.support.fleet import KEY, Fleet
from tests.support.load import chats, clients, problem
from tests.support.processes import Role
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

pytestmark = pytest.mark.processes

FOLLOW_S = 3.0
RELOAD_S = 5.0
ROOT = "sk-test-root"
MORE = f"""
[[keys]]
secret = "{ROOT}"
user = "root"
role = "admin"
"""


class Admin:
    """One gateway's `/admin/backends`."""

    def __init__(self, gateway: Role) -> None:
        self._url = f"{gateway.url}/admin/backends"
        self._client = httpx.AsyncClient(
            trust_env=False, timeout=10, headers={"authorization": f"Bearer {ROOT}"}
        )

    async def listed(self) -> dict[str, Any]:
        response = await self._client.get(self._url)
        assert response.status_code == 200, response.text
        return {entry["url"]: entry for entry in response.json()["data"]}

    async def post(self, action: str, **body: Any) -> int:
        response = await self._client.post(self._url + action, content=json.dumps(body))
        return response.status_code

    async def until(self, url: str, state: str, **wanted: Any) -> dict[str, Any]:
        """Until both dispatchers say so."""

        async def found() -> dict[str, Any]:
            entry: dict[str, Any] = (await self.listed()).get(url, {})
            both = entry.get("dispatchers") == 2 and entry.get("state") == state
            return entry if both and wanted.items() <= entry.items() else {}

        return await wait_until(found, timeout=FOLLOW_S, what=f"{url} is {state} {wanted}")

    async def close(self) -> None:
        await self._client.aclose()


async def test_a_backend_is_added_and_drained_while_jobs_run(tmp_path: Path) -> None:
    """Both dispatchers follow within 3 s, whichever gateway was told, and nothing is lost."""
    engine = EngineSettings(max_num_seqs=4, step_ms=10.0)
    with (
        RedisServer() as server,
        Fleet(tmp_path, server, models=("m1",), users=("alice",), engine=engine, engines=1,
              gateways=2, more=MORE) as fleet,
    ):  # fmt: skip
        new = Role("sim-new", ["sim", "--port", "0", "--model", "m1", "--max-num-seqs", "4"],
                   tmp_path)  # fmt: skip
        new.start()
        await asyncio.to_thread(new.wait_ready, "/health")
        asks = chats(70, "m1", 100, user="alice", tag="s")
        one, two = (Admin(gateway) for gateway in fleet.gateways)
        async with clients(fleet) as raw:
            open_ = [asyncio.ensure_future(raw[i % 2].send(ask)) for i, ask in enumerate(asks)]
            await wait_until(lambda: fleet.waiting() >= 20, timeout=20)
            assert await one.post("", url=new.url, max_num_seqs=4) == 201
            await two.until(new.url, "active", models=["m1"])
            await wait_until(lambda: new.metric("vllm:num_requests_running") >= 4, timeout=10)
            old = fleet.engines[0]
            assert await two.post("/drain", url=old.url) == 200
            entry = await one.until(old.url, "draining")
            assert entry["source"] == "config"
            await wait_until(lambda: old.metric("vllm:num_requests_running") == 0, timeout=20)
            assert fleet.waiting() > 0, "jobs wait, and the drained backend is idle"
            answers = await asyncio.gather(*open_)
        wrong = [
            p for a, g in zip(asks, answers, strict=True) if (p := problem(a, g, fleet.engine))
        ]
        assert not wrong, wrong[:3]
        done = [e.metric("vllm:request_success") for e in (old, new)]
        assert sum(done) == len(asks), "each ran exactly once"
        assert await one.post("/remove", url=new.url) == 200
        await wait_until(
            lambda: all(len(re.findall("has left", d.log())) == 1 for d in fleet.dispatchers),
            timeout=FOLLOW_S,
        )
        await fleet.settle()
        for admin in (one, two):
            await admin.close()
        new.close()


async def asked(url: str, user: str) -> int:
    """The status of a chat."""
    body = {"model": "m1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        response = await client.post(
            f"{url}/v1/chat/completions",
            json=body,
            headers={"authorization": f"Bearer {KEY}{user}"},
        )
    return response.status_code


async def until_may(url: str, user: str) -> None:
    async def may() -> bool:
        return await asked(url, user) == 200

    await wait_until(may, timeout=RELOAD_S, what=f"the key of {user}")


def hang_up(*roles: Role) -> None:
    for role in roles:
        role.send(signal.SIGHUP)


async def test_files_are_read_again(tmp_path: Path) -> None:
    """At SIGHUP and when they change. A bad one changes nothing, and is told of."""
    config, more = tmp_path / "fairlane.toml", tmp_path / "backends.toml"
    keys = '[[keys]]\nsecret = "{}"\nuser = "{}"\n'
    head = f'backends_file = "{more}"\n'
    config.write_text(head + keys.format(KEY + "alice", "alice") + "[models.m1]\n")
    more.write_text("backends = []\n")
    with RedisServer() as server, contextlib.ExitStack() as stack:
        common = ["--config", str(config), "--redis", server.url, "--port", "0"]
        engine = Role("sim", ["sim", "--port", "0", "--model", "m1"], tmp_path)
        gateway = Role("gateway", ["gateway", *common], tmp_path)
        dispatcher = Role("dispatcher", ["dispatcher", *common], tmp_path)
        both = (dispatcher, gateway)
        for role in (engine, *both):
            stack.callback(lambda role=role: print(role.log()[-3000:]))
            stack.callback(role.close)
            role.start()
        await asyncio.to_thread(engine.wait_ready, "/health")
        for role in both:
            await asyncio.to_thread(role.wait_ready, "/readyz")
        waits = asyncio.ensure_future(asked(gateway.url, "alice"))
        assert await asked(gateway.url, "bob") == 401
        await wait_until(lambda: dispatcher.metric("fairlane_wanted_slots") == 1)
        more.write_text(f'[[backends]]\nurl = "{engine.url}"\n')
        assert await waits == 200, "it waited for its backend"

        good = head + keys.format(KEY + "bob", "bob") + "[models.m1]\nslots = 9\n"
        config.write_text(good + "[gateway]\nport = 1\nbody_max_bytes = 2048\n")
        hang_up(*both)
        await until_may(gateway.url, "bob")
        assert await asked(gateway.url, "alice") == 401
        ignored = "gateway.body_max_bytes has changed, which needs a restart"
        await wait_until(lambda: all(ignored in role.log() for role in both))
        await wait_until(lambda: dispatcher.metric("fairlane_slots") == 9)

        more.write_text("[[backends]]\nuri = 1\n")
        config.write_text(good + "[models.m1.class.bulk]\n")
        hang_up(*both)
        await wait_until(lambda: "did you mean `url`?" in dispatcher.log())
        stays = "what was read before stays"
        await wait_until(lambda: all(stays in role.log() for role in both))
        assert dispatcher.metric("fairlane_source_good", "file") == 0
        assert await asked(gateway.url, "bob") == 200

        more.write_text(f'[[backends]]\nurl = "{engine.url}"\n')
        config.write_text(head + keys.format(KEY + "carol", "carol") + "[models.m1]\n")
        await until_may(gateway.url, "carol")  # without a signal
        await wait_until(lambda: dispatcher.metric("fairlane_source_good", "file") == 1)
        for role in both:
            assert role.stop() == 0
