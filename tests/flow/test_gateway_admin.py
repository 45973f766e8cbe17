"""`/admin/backends`: who may, what is refused and how, and what dispatchers are told."""

import json
import re
from typing import Any

import msgspec
import pytest

from common import keys, placed
from common.key_settings import KeySettings
from common.placed import PLACED_MAX
from common.settings import BackendSettings, Settings
from common.wire import VERSION, Announcement, ServedBackend, encode_announcement
from tests.flow.test_gateway_http import ALICE, KEYED, refused
from tests.support.asgi import Exchange, ask
from tests.support.gateway import Site, site

ADMIN = ("Authorization", "Bearer sk-test-admin")
LOCKED = msgspec.structs.replace(
    KEYED, keys=[*KEYED.keys, KeySettings(secret="sk-test-admin", user="root", role="admin")]
)
PATH = "/admin/backends"
GPU = "http://gpu1:8000"


async def post(s: Site, path: str, *headers: tuple[str, str], **body: Any) -> Exchange:
    return await ask(s.app, "POST", path, json.dumps(body).encode(), headers=headers)


async def listed(s: Site) -> dict[str, dict[str, Any]]:
    e = await ask(s.app, "GET", PATH)
    assert e.status == 200 and e.json["object"] == "list"
    return {entry["url"]: entry for entry in e.json["data"]}


async def announce(s: Site, name: str, *backends: ServedBackend, age_ms: int = 0) -> None:
    """As a dispatcher does each second."""
    data = Announcement(VERSION, await s.broker.now_ms() - age_ms, [], list(backends))
    await s.broker.command("HSET", keys.MODELS, name, encode_announcement(data))


async def test_only_an_administrator_s_key_may() -> None:
    async with site(LOCKED) as s:
        for path in (PATH, f"{PATH}/drain", f"{PATH}/undrain", f"{PATH}/remove"):
            e = await post(s, path, url=GPU)
            refused(e, 401, code="invalid_api_key")
            refused(await post(s, path, ("Authorization", "Bearer sk-no"), url=GPU), 401)
            error = refused(await post(s, path, ALICE, url=GPU), 403)
            assert "role is `admin`" in error["message"]
        refused(await ask(s.app, "GET", PATH), 401)
        refused(await ask(s.app, "GET", PATH, headers=[ALICE]), 403)
        assert not (await placed.read(s.broker)).fields
        assert (await post(s, PATH, ADMIN, url=GPU)).status == 201
        assert (await ask(s.app, "GET", PATH, headers=[ADMIN])).status == 200


@pytest.mark.parametrize(
    ("client", "headers", "status"),
    [
        ("127.0.0.1", [], 200), ("::1", [], 200), ("10.1.2.3", [], 403), ("testclient", [], 403),
        ("127.0.0.1", [("Origin", "http://evil.example")], 403),
        ("127.0.0.1", [("X-Forwarded-For", "10.1.2.3")], 403),
    ],
)  # fmt: skip
async def test_without_keys_only_this_machine_may(
    client: str, headers: list[tuple[str, str]], status: int
) -> None:
    async with site() as s:
        e = await ask(s.app, "GET", PATH, headers=headers, client=client)
        assert e.status == status


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", f"{PATH}/drain", 405), ("DELETE", PATH, 405), ("POST", f"{PATH}/nope", 404),
     ("GET", "/admin", 404)],
)  # fmt: skip
async def test_paths_and_methods(method: str, path: str, status: int) -> None:
    async with site() as s:
        refused(await ask(s.app, method, path), status)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"[]", "a JSON object"),
        (b"{}", "url"),
        (b'{"url":7}', "url"),
        (b'{"url":"gpu1:8000"}', "begins with http://"),
        (b'{"url":"http://gpu1:8000/v1"}', "scheme, host and port alone"),
        (b'{"url":"http://u:p@gpu1:8000"}', "scheme, host and port alone"),
        (b'{"url":"http://gpu1:8000","max_num_seq":4}', "did you mean `max_num_seqs`?"),
        (b'{"url":"http://gpu1:8000","engine":"vlm"}', "engine"),
        (b'{"url":"http://gpu1:8000","max_num_seqs":0}', "max_num_seqs"),
        (b'{"url":"http://' + b"x" * 2_000 + b'"}', "at most 1024"),
    ],
)
async def test_what_is_no_backend_is_refused(body: bytes, says: str) -> None:
    async with site() as s:
        error = refused(await ask(s.app, "POST", PATH, body), 400, type="invalid_request_error")
        assert says in error["message"] and not re.search(r"[?.]\.$", error["message"])
        assert not (await placed.read(s.broker)).fields


async def test_add_drain_undrain_remove() -> None:
    async with site() as s:
        added = await post(s, PATH, url=GPU + "/", max_num_seqs=8, api_key="sk-engine")
        assert added.status == 201
        assert added.json["url"] == GPU and added.json["state"] == "pending"
        kept = (await placed.read(s.broker)).added
        assert kept == {GPU: BackendSettings(url=GPU + "/", max_num_seqs=8, api_key="sk-engine")}
        assert (await listed(s))[GPU]["source"] == "admin"
        await announce(s, "d1", ServedBackend(GPU, GPU, "admin", "active", ["m1"], True, 3))
        await announce(s, "d2", ServedBackend(GPU, GPU, "admin", "active", ["m2"], False, 1))
        entry = (await listed(s))[GPU]
        assert (entry["state"], entry["models"]) == ("active", ["m1", "m2"])
        assert (entry["running"], entry["dispatchers"], entry["reachable"]) == (4, 2, True)
        for _ in range(2):  # saying it again is no error
            e = await post(s, f"{PATH}/drain", url=GPU)
            assert e.status == 200 and e.json["data"][0]["state"] == "draining"
        assert (await placed.read(s.broker)).drained == {GPU}
        for _ in range(2):
            e = await post(s, f"{PATH}/undrain", url=GPU)
            assert e.status == 200 and e.json["data"][0]["state"] == "active"
        await post(s, f"{PATH}/drain", url=GPU)
        e = await post(s, f"{PATH}/remove", url=GPU)
        assert e.status == 200 and e.json["data"][0]["state"] == "leaving"
        now = await placed.read(s.broker)
        assert not now.added and not now.drained
        everything = added.body + e.body + (await ask(s.app, "GET", PATH)).body
        assert b"sk-engine" not in everything
        assert (await post(s, PATH, url=GPU)).status == 201, "though it has not left yet"


async def test_a_backend_that_is_there_already_or_not_at_all() -> None:
    async with site() as s:
        assert (await post(s, PATH, url=GPU)).status == 201
        refused(await post(s, PATH, url=GPU + "/"), 409, param="url", code="backend_exists")
        for action in ("drain", "undrain", "remove"):
            e = await post(s, f"{PATH}/{action}", url="http://gpu9:8000")
            error = refused(e, 404, param="url", code="backend_not_found")
            assert GPU in error["message"]


async def test_a_backend_of_the_configuration_can_be_drained_and_not_removed() -> None:
    one, two = (ServedBackend(f"http://10.0.0.{n}:8000", GPU, "config", "active", ["m1"], True, 0)
                for n in (1, 2))  # fmt: skip
    async with site() as s:
        await announce(s, "d1", one, two)
        await announce(s, "gone", msgspec.structs.replace(one, url="http://old"), age_ms=60_000)
        assert set(await listed(s)) == {one.url, two.url}
        refused(await post(s, f"{PATH}/remove", url=GPU), 409, code="backend_configured")
        refused(await post(s, PATH, url=one.url), 409, code="backend_exists")
        e = await post(s, f"{PATH}/drain", url=GPU)  # by its name: each of its addresses
        assert [b["state"] for b in e.json["data"]] == ["draining", "draining"]
        await post(s, f"{PATH}/undrain", url=GPU)
        e = await post(s, f"{PATH}/drain", url=one.url)
        states = {u: b["state"] for u, b in (await listed(s)).items()}
        assert states == {one.url: "draining", two.url: "active"}


async def test_there_is_a_most() -> None:
    async with site() as s:
        for n in range(PLACED_MAX):
            url = f"http://gpu-{n}:8000"
            assert await placed.add(s.broker, BackendSettings(url=url)) == "added"
        refused(await post(s, PATH, url=GPU), 409, code="too_many_backends")
        assert len((await placed.read(s.broker)).added) == PLACED_MAX
        await post(s, f"{PATH}/remove", url="http://gpu-0:8000")
        assert (await post(s, PATH, url=GPU)).status == 201


async def test_without_redis_it_is_unavailable() -> None:
    async with site(Settings()) as s:
        await s.broker.link.close()
        s.server.connected = False
        refused(await ask(s.app, "GET", PATH), 503)
        refused(await post(s, PATH, url=GPU), 503)
