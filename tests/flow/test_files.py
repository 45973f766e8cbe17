"""OpenAI's Files API on the gateway: the official client, bad forms, other people's files."""

import re
from pathlib import Path
from typing import Any

import openai
import pytest

from common.key_settings import KeySettings
from common.settings import GatewaySettings, Settings
from common.store_settings import StoreSettings
from tests.support.asgi import Exchange, ask
from tests.support.files import (
    ALICE,
    BOB,
    BOUNDARY,
    FORM,
    bearer,
    error,
    field_part,
    file_part,
    form,
    get,
    keeping,
    kept,
    official,
    settings,
    upload,
)
from tests.support.gateway import site
from tests.support.s3 import s3

END = f"--{BOUNDARY}--\r\n".encode()


async def uploaded(app: Any, key: str = ALICE, content: bytes = b"hello\n", **fields: str) -> Any:
    e = await upload(app, key, form(content, **fields))
    assert e.status == 200, e.body
    return e.json


async def test_the_official_client(tmp_path: Path) -> None:
    content = bytes(range(256)) * 30_000  # 7.7 MB: in parts, and every byte is in it
    async with keeping(tmp_path) as s, official(s.app) as client:
        made = await client.files.create(file=("in put.jsonl", content), purpose="batch")
        assert re.fullmatch(r"file-[0-9a-f]{44}", made.id)
        assert (made.object, made.bytes, made.filename) == ("file", len(content), "in put.jsonl")
        assert (made.purpose, made.status) == ("batch", "processed")
        assert made.expires_at == made.created_at + 30 * 86_400
        assert await client.files.retrieve(made.id) == made
        assert (await client.files.content(made.id)).content == content
        other = await client.files.create(
            file=b"x", purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3_600},
        )  # fmt: skip
        assert other.expires_at == other.created_at + 3_600
        stays = await client.files.create(file=b"", purpose="vision")
        assert stays.expires_at is None and stays.bytes == 0
        assert (await client.files.content(stays.id)).content == b""
        assert [f.id async for f in client.files.list()] == [stays.id, other.id, made.id]
        assert [f.id async for f in client.files.list(purpose="batch")] == [made.id]
        gone = await client.files.delete(made.id)
        assert gone.deleted and gone.id == made.id
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        assert len(kept(tmp_path)) == 4, "content and record of the two that are left"


async def test_in_a_bucket() -> None:
    content = b"0123456789" * 700_000
    async with s3() as (fake, options):
        store = StoreSettings(url="s3://bucket/fairlane", options=options)
        async with site(Settings(store=store)) as s, official(s.app) as client:
            made = await client.files.create(file=("a.jsonl", content), purpose="batch")
            assert (await client.files.content(made.id)).content == content
            assert [f.id async for f in client.files.list()] == [made.id]
            assert len(fake.objects) == 2 and not fake.uploads
            assert (await client.files.delete(made.id)).deleted
            assert fake.objects == {}


async def test_pages(tmp_path: Path) -> None:
    async with keeping(tmp_path) as s, official(s.app) as client:
        ids = [(await uploaded(s.app, purpose=p))["id"] for p in ("batch", "vision") * 4]
        assert ids == sorted(ids), "ids are in the order of their making"
        assert [f.id async for f in client.files.list(limit=3)] == ids[::-1]
        assert [f.id async for f in client.files.list(limit=3, order="asc")] == ids
        page = await client.files.list(limit=2, purpose="vision", order="asc")
        assert [f.id for f in page.data] == [ids[1], ids[3]] and page.has_more
        rest = await client.files.list(limit=2, purpose="vision", order="asc", after=ids[3])
        assert [f.id for f in rest.data] == [ids[5], ids[7]] and not rest.has_more
        raw = (await get(s.app, "/v1/files?limit=2")).json
        assert raw["object"] == "list"
        assert (raw["first_id"], raw["last_id"]) == (ids[7], ids[6])
        none = (await get(s.app, "/v1/files", BOB)).json
        assert none["data"] == [] and none["first_id"] is None and not none["has_more"]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=10001", "limit"), ("limit=x", "limit"), ("limit=-1", "limit"),
     ("order=up", "order"), ("purpose=batches", "purpose"), ("limit=%FF%FE", "limit"),
     ("&".join(f"a{i}=1" for i in range(40)), None)],
)  # fmt: skip
async def test_a_list_that_cannot_be(query: str, param: str | None, tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        e = await get(s.app, f"/v1/files?{query}")
        assert e.status == 400 and error(e)["param"] == param


async def test_fields_behind_the_file_count_too(tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        body = file_part(b"abc") + field_part("purpose", "user_data") + END
        e = await upload(s.app, body=[body[i : i + 1] for i in range(len(body))])
        assert e.status == 200 and e.json["purpose"] == "user_data" and e.json["bytes"] == 3


FORMS: list[tuple[bytes, str | None, str]] = [
    (field_part("purpose", "batch") + END, "file", "required"),
    (file_part(b"x") + END, "purpose", "required"),
    (form(purpose="answers"), "purpose", "'answers' is not one of ['fine-tune',"),
    (form(purpose="batch_output"), "purpose", "is not one of"),
    (form(purpose=""), "purpose", "is not one of"),
    (form() + b"", None, ""),
    (file_part(b"x") + file_part(b"y") + field_part("purpose", "batch") + END, "file", "one"),
    (field_part("purpose", "batch") + form(), "purpose", "twice"),
    (form(more="x" * 5_000), None, "longer"),
    (b"".join(field_part(f"f{i}", "x") for i in range(20)) + form(), None, "parts"),
    (form()[:-8], None, "ends within"),
    (form(b"x" * 100)[:150], None, "ends within"),
    (b"", None, "ends within"),
    (b"no form at all", None, "valid"),
    (form(**{"expires_after[anchor]": "now"}), "expires_after", "created_at"),
    (form(**{"expires_after[seconds]": "3600"}), "expires_after", "created_at"),
    (form(**{"expires_after[anchor]": "created_at"}), "expires_after", "whole"),
    *[
        (form(**{"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}),
         "expires_after", "`expires_after[seconds]` must be")
        for seconds in ("3599", "2592001", "-1", "1e4", "9" * 900, "٣٦٠٠")
    ],
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "text"), FORMS)
async def test_forms(body: bytes, param: str | None, text: str, tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        e = await upload(s.app, body=body)
        if not text:
            assert e.status == 200  # the one that is right, so that the others are not refused all
            return
        assert e.status == 400, e.body
        found = error(e)
        assert found["param"] == param and text in found["message"]
        assert found["type"] == "invalid_request_error"
        assert kept(tmp_path) == []


@pytest.mark.parametrize(
    "kind",
    [None, "application/json", "multipart/form-data", "multipart/form-data; boundary=",
     "multipart/form-data; boundary=" + "b" * 300, "multipart/mixed; boundary=b"],
)  # fmt: skip
async def test_a_body_that_is_no_form(kind: str | None, tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        headers = [bearer(ALICE)] + ([("Content-Type", kind)] if kind else [])
        e = await ask(s.app, "POST", "/v1/files", form(), headers=headers)
        assert e.status == 400 and error(e)["type"] == "invalid_request_error"


NAMES: list[bytes] = [
    b"../../etc/passwd", b"a\\0b", b"a\0b", b"a%00b", b"x" * 5_120, "模型 ☃.jsonl".encode(), b"",
    b"/etc/passwd", b"..", b"C:\\temp\\x", b"\xff\xfe", b"a\\\"b", b"file-" + b"0" * 44,
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_fil_01_a_name_is_only_told(name: bytes, tmp_path: Path) -> None:
    """Whatever a file is called, it is stored under an id of ours, inside the root."""
    root = tmp_path / "deep" / "root"
    root.mkdir(parents=True)
    async with keeping(root) as s:
        e = await upload(s.app, body=form(b"content", name))
        assert e.status == 200, e.body
        assert re.fullmatch(r"file-[0-9a-f]{44}", e.json["id"])
        if name.isalnum() or name.startswith(b"."):
            assert e.json["filename"] == name.decode()
        content = await get(s.app, f"/v1/files/{e.json['id']}/content")
        assert content.body == b"content" and content.headers["content-length"] == "7"
        assert (await get(s.app, f"/v1/files/{e.json['id']}")).json == e.json
        assert kept(tmp_path) == kept(root) and len(kept(root)) == 2


async def test_fil_01_paths_for_ids(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    secret = tmp_path / "secret.json"
    secret.write_text('{"id":"secret"}')
    async with keeping(root) as s:
        mine = (await uploaded(s.app))["id"]
        before = [(p, p.read_bytes()) for p in kept(tmp_path)]
        ids = [
            "../../etc/passwd", "../secret.json", "..", ".", "", "*", mine + ".json", "x" * 9_000,
            mine + "/../" + mine, mine.upper(), mine + "\n", mine + "\0", mine[:-1], "模型",
        ]  # fmt: skip
        for id in ids:
            for method, path in (("GET", "/content"), ("GET", ""), ("DELETE", "")):
                e = await get(s.app, f"/v1/files/{id}{path}", method=method)
                assert e.status == 404, (method, id, path, e.body)
        assert [(p, p.read_bytes()) for p in kept(tmp_path)] == before


async def test_aut_08_files_of_others(tmp_path: Path) -> None:
    """Another's file is, in every answer, one that never was."""
    unknown = "file-" + "0" * 44
    async with keeping(tmp_path) as s:
        mine = (await uploaded(s.app, ALICE))["id"]
        (await uploaded(s.app, BOB))["id"]
        for method, path in (("GET", ""), ("HEAD", ""), ("DELETE", ""), ("GET", "/content"),
                             ("HEAD", "/content")):  # fmt: skip
            foreign = await get(s.app, f"/v1/files/{mine}{path}", BOB, method)
            never = await get(s.app, f"/v1/files/{unknown}{path}", BOB, method)
            assert foreign.status == never.status == 404
            assert foreign.body == never.body and foreign.headers == never.headers
        listed = (await get(s.app, "/v1/files", BOB)).json["data"]
        assert mine not in [f["id"] for f in listed] and len(listed) == 1
        after = (await get(s.app, f"/v1/files?order=asc&after={mine}", BOB)).json["data"]
        assert mine not in [f["id"] for f in after]
        assert (await get(s.app, f"/v1/files/{mine}/content")).body == b"hello\n"
        for path in (f"/v1/files/{mine}", f"/v1/files/{mine}/content", "/v1/files"):
            assert (await ask(s.app, "GET", path)).status == 401


async def test_people_of_one_key_have_files_of_their_own(tmp_path: Path) -> None:
    key = KeySettings(secret=ALICE, user="webui", user_from=["header:X-User", "body:user"])
    store = StoreSettings(url=f"file://{tmp_path}")
    async with site(Settings(keys=[key], store=store)) as s:
        ids = {}
        for who in ("ann", "ben", "Ann", ""):
            headers = [bearer(ALICE), FORM, ("X-User", who)]
            ids[who] = (await ask(s.app, "POST", "/v1/files", form(), headers=headers)).json["id"]
        for who, id in ids.items():
            listed = await ask(s.app, "GET", "/v1/files", headers=[bearer(ALICE), ("X-User", who)])
            assert [f["id"] for f in listed.json["data"]] == [id]


@pytest.mark.parametrize("record", [b"", b'{"id', b"\xff", b"[" * 9_999, b" " * (2 << 20)])
async def test_a_record_that_is_none_hides_no_others(record: bytes, tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        spoilt, whole = [(await upload(s.app)).json["id"] for _ in range(2)]
        (path,) = (p for p in kept(tmp_path) if p.name == f"{spoilt}.json")
        path.write_bytes(record)
        assert [f["id"] for f in (await get(s.app, "/v1/files")).json["data"]] == [whole]
        assert (await get(s.app, f"/v1/files/{spoilt}")).status == 404
        assert await s.gateway.files.sweep() == 0
        assert path.read_bytes() == record, "it is for the operator to look at"


async def test_browsers_may_delete(tmp_path: Path) -> None:
    async with site(settings(tmp_path, GatewaySettings(cors_origins=["https://ui"]))) as s:
        headers = [("Origin", "https://ui"), ("Access-Control-Request-Method", "DELETE")]
        e = await ask(s.app, "OPTIONS", "/v1/files/file-1", headers=headers)
        assert "DELETE" in e.headers["access-control-allow-methods"]


async def test_the_key_is_looked_at_before_the_form(tmp_path: Path) -> None:
    async with (
        keeping(tmp_path) as s,
        Exchange(s.app, "POST", "/v1/files", [b"x"] * 3, [bearer("sk-wrong"), FORM]) as e,
    ):
        await e.until_over()
        assert e.status == 401 and e.received_before == 0


async def test_methods(tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        for method, path in (("PUT", "/v1/files"), ("DELETE", "/v1/files"), ("POST", "/v1/files/x"),
                             ("POST", "/v1/files/x/content")):  # fmt: skip
            e = await get(s.app, path, method=method)
            assert e.status == 405 and "GET" in e.headers["allow"]
