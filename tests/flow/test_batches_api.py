"""OpenAI's Batch API on the gateway: the official client, wrong requests, others' batches."""

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from prometheus_client import CollectorRegistry

from common import keys
from common.batch_settings import BatchSettings
from common.broker import Broker, open_link
from common.errors import ConfigError
from common.outcomes import Outcome
from common.service import running
from common.wire import End
from fairlane.roles import _works
from gateway.batches.worker import BatchWorker
from gateway.batches_api import NO_BATCH
from gateway.files_api import NO_FILE
from tests.flow.batch_world import jsonl, request
from tests.support.asgi import Exchange, ask
from tests.support.files import (
    ALICE,
    BOB,
    bearer,
    error,
    form,
    get,
    kept,
    official,
    settings,
    upload,
)
from tests.support.gateway import Site, site
from tests.support.redis_server import RedisServer
from tests.support.wait import wait_until

GIVEN = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}


@contextlib.asynccontextmanager
async def batching(folder: Path, **batch: Any) -> AsyncIterator[Site]:
    """A gateway whose files are in this folder, and no worker."""
    made = msgspec.structs.replace(settings(folder), batch=BatchSettings(**batch))
    async with site(made) as s:
        yield s


@contextlib.asynccontextmanager
async def working(s: Site) -> AsyncIterator[BatchWorker]:
    """A worker beside the gateway: arq on the embedded broker."""
    worker = BatchWorker(s.gateway.settings, s.broker, "w1", CollectorRegistry(), s.server)
    await worker.check()
    async with running(worker.run()):
        yield worker


async def uploaded(app: Any, content: bytes, key: str = ALICE, **fields: str) -> str:
    e = await upload(app, key, form(content, **fields))
    assert e.status == 200, e.body
    return str(e.json["id"])


async def post(app: Any, path: str, body: Any, key: str = ALICE) -> Exchange:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return await ask(app, "POST", path, data, headers=[bearer(key)])


async def answer(s: Site, n: int) -> None:
    """Run the next jobs, as an engine would."""
    for _ in range(n):
        run = await s.dispatcher.pop("batch")
        log = (0, 1)
        lease = run.lease
        head = s.dispatcher.batch([run.head(200, False), run.data(b'{"id":"a","usage":null}')])
        await s.dispatcher.queue.start(
            lease.job, s.dispatcher.name, lease.attempt, lease.channel, head, log=log
        )
        await _settle(s, run)


async def _settle(s: Site, run: Any) -> None:
    end = End(run.lease.job, run.lease.attempt, run.seq, Outcome.FINISHED, "", None)
    s.dispatcher.runs.remove(run)
    word = await s.dispatcher.queue.settle(
        run.lease, s.dispatcher.name, Outcome.FINISHED, s.dispatcher.batch([end]),
        log=(run.seq, run.seq),
    )  # fmt: skip
    assert word == "settled"


async def test_the_official_client(tmp_path: Path) -> None:
    """The documented flow, with an arq worker on the embedded broker."""
    async with batching(tmp_path) as s, working(s), official(s.app) as client:
        content = jsonl(*(request(n) for n in range(5)))
        made = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=made.id, endpoint="/v1/chat/completions", completion_window="24h",
            metadata={"what": "test"},
        )  # fmt: skip
        assert re.fullmatch(r"batch_[0-9a-f]{32}", batch.id)
        assert (batch.object, batch.status, batch.input_file_id) == (
            "batch", "validating", made.id,
        )  # fmt: skip
        assert batch.expires_at == batch.created_at + 86_400
        assert batch.metadata == {"what": "test"} and batch.errors is None
        await answer(s, 5)

        async def over() -> Any:
            found = await client.batches.retrieve(batch.id)
            return found if found.status == "completed" else None

        done = await wait_until(over, timeout=30, what="the end")
        assert done.request_counts.completed == done.request_counts.total == 5
        text = (await client.files.content(done.output_file_id)).text
        assert sorted(msgspec.json.decode(x)["custom_id"] for x in text.splitlines()) == [
            f"r{n}" for n in range(5)
        ]
        assert (await client.files.retrieve(done.output_file_id)).purpose == "batch_output"
        listed = [b.id async for b in client.batches.list(limit=1)]
        assert listed == [batch.id]
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            await client.batches.cancel(batch.id)
        with pytest.raises(openai.NotFoundError):
            await client.batches.retrieve("batch_" + "0" * 32)

        async def clean() -> bool:
            return not [p for p in kept(tmp_path) if "batches" in p.parts]

        await wait_until(clean, what="no parts")


async def test_cancelling(tmp_path: Path) -> None:
    """Once, twice, and after the end."""
    async with batching(tmp_path) as s, official(s.app) as client:
        made = await client.files.create(file=jsonl(request(1)), purpose="batch")
        batch = await client.batches.create(input_file_id=made.id, **GIVEN)  # type: ignore[arg-type]
        for _ in range(2):
            again = await client.batches.cancel(batch.id)
            assert again.status == "cancelling" and again.cancelling_at
        async with working(s):

            async def over() -> bool:
                return (await client.batches.retrieve(batch.id)).status == "cancelled"

            await wait_until(over, timeout=15, what="the end")
        assert (await client.batches.cancel(batch.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await client.batches.cancel("batch_" + "1" * 32)


async def test_pages(tmp_path: Path) -> None:
    async with batching(tmp_path) as s, official(s.app) as client:
        file = await uploaded(s.app, b"x")
        ids = []
        for _ in range(5):
            batch = await client.batches.create(input_file_id=file, **GIVEN)  # type: ignore[arg-type]
            ids.insert(0, batch.id)
        found = [b.id async for b in client.batches.list(limit=2)]
        assert sorted(found) == sorted(ids) and len(found) == 5
        page = (await get(s.app, "/v1/batches?limit=2")).json
        assert page["has_more"] and page["first_id"] == page["data"][0]["id"]
        assert page["last_id"] == page["data"][1]["id"]
        for query in ("limit=0", "limit=101", "limit=x", "limit=-1"):
            assert (await get(s.app, f"/v1/batches?{query}")).status == 400
        empty = (await get(s.app, "/v1/batches", BOB)).json
        assert empty == {
            "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"endpoint": None}, "endpoint"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"endpoint": ["/v1/embeddings"]}, "endpoint"),
        ({"completion_window": None}, "completion_window"),
        ({"completion_window": "24"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": "169h"}, "completion_window"),
        ({"completion_window": "1h\n"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {f"k{n}": "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3_600}}, "output_expires_after"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3_599}},
            "output_expires_after",
        ),
    ],
)
async def test_what_is_wrong_is_named(tmp_path: Path, changes: Any, param: str) -> None:
    async with batching(tmp_path) as s:
        file = await uploaded(s.app, b"x")
        e = await post(s.app, "/v1/batches", {"input_file_id": file} | GIVEN | changes)
        assert e.status == 400
        assert error(e)["param"] == param and error(e)["type"] == "invalid_request_error"
        assert await s.broker.command("KEYS", "fl:batch*") == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"null"])
async def test_a_body_that_is_none(tmp_path: Path, body: bytes) -> None:
    async with batching(tmp_path) as s:
        assert (await post(s.app, "/v1/batches", body)).status == 400


@pytest.mark.parametrize(("window", "seconds"), [("1m", 60), ("90m", 5_400), ("168h", 604_800)])
async def test_other_windows(tmp_path: Path, window: str, seconds: int) -> None:
    async with batching(tmp_path) as s:
        file = await uploaded(s.app, b"x")
        asked = GIVEN | {"input_file_id": file, "completion_window": window}
        made = (await post(s.app, "/v1/batches", asked)).json
        assert made["completion_window"] == window
        assert made["expires_at"] - made["created_at"] == seconds


async def test_a_file_for_another_purpose(tmp_path: Path) -> None:
    """BAT-11."""
    async with batching(tmp_path) as s:
        file = await uploaded(s.app, jsonl(request(1)), purpose="vision")
        e = await post(s.app, "/v1/batches", GIVEN | {"input_file_id": file})
        assert e.status == 400 and error(e)["code"] == "invalid_file_purpose"


async def test_what_is_in_a_file_is_told_later(tmp_path: Path) -> None:
    """BAT-02: the request itself succeeds, whatever the file holds."""
    async with batching(tmp_path) as s, working(s):
        file = await uploaded(s.app, b"no json\n")
        e = await post(s.app, "/v1/batches", GIVEN | {"input_file_id": file})
        assert e.status == 200 and e.json["status"] == "validating"

        async def failed() -> Any:
            found = (await get(s.app, f"/v1/batches/{e.json['id']}")).json
            return found if found["status"] == "failed" else None

        found = await wait_until(failed, timeout=10, what="failed")
        assert found["errors"]["object"] == "list"
        (told,) = found["errors"]["data"]
        assert (told["code"], told["line"]) == ("invalid_json_line", 1)
        assert set(told) == {"code", "line", "message", "param"}


async def test_other_peoples(tmp_path: Path) -> None:
    """AUT-08: as if they were not there."""
    async with batching(tmp_path) as s:
        file = await uploaded(s.app, jsonl(request(1)))
        e = await post(s.app, "/v1/batches", GIVEN | {"input_file_id": file}, BOB)
        never = await post(s.app, "/v1/batches", GIVEN | {"input_file_id": "file-none"}, BOB)
        assert e.status == never.status == 404 and e.body == never.body
        made = (await post(s.app, "/v1/batches", GIVEN | {"input_file_id": file})).json["id"]
        none = "batch_" + "0" * 32
        looked = [await get(s.app, f"/v1/batches/{id}", BOB) for id in (made, none, "x", "..%2f")]
        cancelled = [await post(s.app, f"/v1/batches/{id}/cancel", b"", BOB) for id in (made, none)]
        assert {x.status for x in (*looked, *cancelled)} == {404}
        assert {x.body for x in (*looked, *cancelled)} == {NO_BATCH.body()}
        assert (await get(s.app, f"/v1/batches/{made}")).json["status"] == "validating"
        assert (await get(s.app, "/v1/batches", BOB)).json["data"] == []
        assert (await get(s.app, f"/v1/files/{file}", BOB)).body == NO_FILE.body()
        assert (await get(s.app, "/v1/batches", "sk-wrong-key")).status == 401
        assert (await post(s.app, "/v1/batches", GIVEN, "sk-wrong-key")).status == 401


async def test_how_many_there_may_be(tmp_path: Path) -> None:
    async with batching(tmp_path, user_active_max=2, active_max=3) as s:
        mine, his = await uploaded(s.app, b"x"), await uploaded(s.app, b"x", BOB)
        asked = [
            (await post(s.app, "/v1/batches", GIVEN | {"input_file_id": f}, k)).status
            for f, k in [(mine, ALICE)] * 3 + [(his, BOB)] * 2
        ]
        assert asked == [200, 200, 429, 200, 503]


async def test_methods(tmp_path: Path) -> None:
    async with batching(tmp_path) as s:
        assert (await get(s.app, "/v1/batches", method="DELETE")).status == 405
        assert (await get(s.app, "/v1/batches/batch_1", method="POST")).status == 405
        assert (await get(s.app, "/v1/batches/batch_1/cancel")).status == 405


async def test_without_redis_or_store(tmp_path: Path) -> None:
    async with batching(tmp_path) as s:
        file = await uploaded(s.app, b"x")
        s.server.connected = False
        await s.broker.link.close()
        for e in (
            await post(s.app, "/v1/batches", GIVEN | {"input_file_id": file}),
            await get(s.app, "/v1/batches"),
            await get(s.app, "/v1/batches/batch_" + "0" * 32),
        ):
            assert e.status == 503 and e.headers["retry-after"]


async def test_what_arq_is_told_is_no_pickle(tmp_path: Path) -> None:
    async with batching(tmp_path) as s, working(s):

        async def there() -> list[bytes]:
            found = await s.broker.command("KEYS", "arq:job:*")
            return [x for key in found if (x := await s.broker.command("GET", key))]

        for packed in await wait_until(there, timeout=10, what="a job of arq's"):
            assert msgspec.msgpack.decode(packed)["f"] in ("tick", "clean", "turn")
        assert await s.broker.command("ZCARD", keys.BATCH_TURNS) >= 0


async def test_a_cluster_has_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_server: RedisServer
) -> None:
    broker = Broker(open_link(redis_server.url))
    async with running(broker.run()):
        await broker.up.wait()
        worker = BatchWorker(settings(tmp_path), broker, "w1", CollectorRegistry())
        await worker.check()

        async def clustered(*args: object) -> bytes:
            assert args == ("INFO", "cluster")
            return b"# Cluster\r\ncluster_enabled:1\r\n"

        monkeypatch.setattr(broker, "command", clustered)
        with pytest.raises(ConfigError, match="Redis Cluster"):
            await worker.check()
        assert not await _works(worker), "fairlane up goes on without"
