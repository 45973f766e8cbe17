"""The Files API at its limits: sizes, times, uploads cut off, a store that is not there."""

import asyncio
import os
from pathlib import Path

import pytest

from common.service import running
from common.store import PART_BYTES, Store
from common.store_settings import StoreSettings
from gateway import files_api
from gateway.auth import Keys
from gateway.client import PART_S
from gateway.files import ORPHAN_S, Files, QuotaError
from gateway.files_api import FilesApi
from tests.support.asgi import Exchange
from tests.support.files import (
    ALICE,
    BOB,
    FORM,
    bearer,
    error,
    form,
    get,
    keeping,
    kept,
    upload,
)
from tests.support.wait import wait_until

UNREACHABLE = {"aws_endpoint": "http://127.0.0.1:9", "aws_region": "x",
               "aws_access_key_id": "a", "aws_secret_access_key": "b"}  # fmt: skip
BIG = form(b"x" * (3 * PART_BYTES))
PIECES = [BIG[i : i + 65_536] for i in range(0, len(BIG), 65_536)]


class Hand:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def files_in(folder: Path, now: Hand, **settings: int) -> Files:
    return Files(Store(f"file://{folder}"), StoreSettings(**settings), now)


async def made(files: Files, owner: str = "alice", content: bytes = b"abc", **kw: int) -> str:
    async def chunks():  # type: ignore[no-untyped-def]
        yield content

    async with files.uploading(owner) as up:
        await up.take(chunks())
        return (await up.commit("name", "batch", **kw)).id


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_file_that_is_too_large(chunked: bool, tmp_path: Path) -> None:
    async with keeping(tmp_path, files_max_bytes=2_000_000) as s:
        for size, status in ((2_000_000, 200), (2_000_001, 413), (3_500_000, 413)):
            body = form(b"x" * size)
            sent = [body[i : i + 99_999] for i in range(0, size, 99_999)] if chunked else body
            e = await upload(s.app, body=sent)
            assert e.status == status, (size, e.body)
            if status == 413:
                assert error(e)["code"] == "request_too_large"
        assert len(kept(tmp_path)) == 2


async def test_what_one_user_may_have(tmp_path: Path) -> None:
    async with keeping(tmp_path, user_files_max_bytes=5_000, user_files_max=3) as s:
        first = (await upload(s.app, body=form(b"x" * 3_000))).json["id"]
        over = await upload(s.app, body=form(b"x" * 2_001))
        assert over.status == 400 and error(over)["code"] == "storage_limit_exceeded"
        assert (await upload(s.app, BOB, form(b"x" * 5_000))).status == 200, "each has their own"
        assert (await upload(s.app, body=form(b"x" * 2_000))).status == 200
        assert (await upload(s.app, body=form(b""))).status == 200
        many = await upload(s.app, body=form(b""))
        assert many.status == 400 and "3 files" in error(many)["message"]
        await get(s.app, f"/v1/files/{first}", method="DELETE")
        assert (await upload(s.app, body=form(b"x" * 3_000))).status == 200
        assert len(kept(tmp_path)) == 8


async def test_uploads_at_once_are_counted_together(tmp_path: Path) -> None:
    """Each fits by itself; what comes to be does too, whichever replica it came by."""
    files = files_in(tmp_path, Hand(), user_files_max_bytes=5_000)

    async def one() -> None:
        await made(files, content=b"x" * 3_000)

    results = await asyncio.gather(one(), one(), return_exceptions=True)
    assert any(isinstance(r, QuotaError) for r in results)
    assert sum(p.stat().st_size for p in kept(tmp_path) if p.suffix != ".json") <= 5_000


async def test_results_are_never_too_much(tmp_path: Path) -> None:
    files = files_in(tmp_path, Hand(), user_files_max=1)
    await made(files)
    with pytest.raises(QuotaError):
        await made(files)
    async with files.uploading("alice", limited=False) as up:
        assert (await up.commit("out", "batch_output")).bytes == 0


async def test_expired_files_are_gone_at_once(tmp_path: Path) -> None:
    now = Hand()
    files = files_in(tmp_path, now)
    short = [await made(files, expires_after_s=3_600) for _ in range(3)]
    now.now += 1
    stays = await made(files)
    now.now += 3_598
    record = await files.find("alice", short[0])
    assert record is not None and record.expires_at == int(now.now + 1)
    now.now += 1
    assert await files.find("alice", short[0]) is None
    assert len(kept(tmp_path)) == 6, "whoever looks for one removes it"
    assert not await files.delete("alice", short[1])
    assert [f.id for f in (await files.page("alice")).files] == [stays]
    assert len(kept(tmp_path)) == 2, "and so does who lists them"


async def test_a_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All owners' expired files, and what dead processes left; no more at once than it may."""
    monkeypatch.setattr("gateway.files.SWEEP_MAX", 7)
    now = Hand()
    files = files_in(tmp_path, now)
    stay = set()
    for owner in ("alice", "bob", "carol"):
        stay |= {await made(files, owner) for _ in range(4)}
        now.now += 1
        await made(files, owner, expires_after_s=3_600)
    folder = kept(tmp_path)[0].parent
    for name in ("file-orphan", "file-new", "file-cut#1", "file-now#1"):
        (folder / name).write_bytes(b"x")
    for path in kept(tmp_path):
        new = path.name in ("file-new", "file-now#1")
        age = 10.0 if new else ORPHAN_S + 10
        os.utime(path, (now.now - age, now.now - age))
    now.now += 4_000
    sweeps = [await files.sweep() for _ in range(7)]
    assert sum(sweeps) == 5 and max(sweeps) < 5, "it goes on where it left off"
    names = {p.name for p in kept(tmp_path)}
    assert names == stay | {f"{id}.json" for id in stay} | {"file-new", "file-now#1"}


async def test_an_upload_that_its_client_leaves(tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        headers = [bearer(ALICE), FORM]
        async with Exchange(s.app, "POST", "/v1/files", PIECES[:-20], headers, stalls=True) as e:
            await wait_until(lambda: kept(tmp_path), what="a part in the store")
            assert all("#" in p.name for p in kept(tmp_path)), "nothing is there by its name"
            e.leave()
            await e.until_over()
            assert e.status == 0
        assert kept(tmp_path) == []
        assert (await get(s.app, "/v1/files")).json["data"] == []


@pytest.mark.looptime
async def test_an_upload_whose_client_falls_silent(tmp_path: Path) -> None:
    async with keeping(tmp_path) as s:
        start = asyncio.get_running_loop().time()
        headers = [bearer(ALICE), FORM]
        async with Exchange(s.app, "POST", "/v1/files", PIECES[:9], headers, stalls=True) as e:
            await e.until_over(200)
            assert e.status == 408 and error(e)["code"] == "request_timeout"
        assert PART_S <= asyncio.get_running_loop().time() - start < PART_S + 10
        assert kept(tmp_path) == []


async def test_part_of_a_file_is_read(tmp_path: Path) -> None:
    files = files_in(tmp_path, Hand())
    record = await files.find("alice", await made(files, content=b"0123456789"))
    assert record is not None
    for start, end, wanted in ((0, None, b"0123456789"), (3, 5, b"34"), (8, 99, b"89")):
        assert b"".join([b async for b in files.read(record, start, end)]) == wanted


async def test_a_sweep_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files_api, "SWEEP_S", 0.01)
    away = Store("s3://bucket", UNREACHABLE)
    api = FilesApi(Keys([]), Files(away, StoreSettings()), 1_000)
    async with running(api.sweep()):
        await wait_until(lambda: caplog.text.count("cannot sweep files") >= 2, timeout=30)


async def test_an_upload_that_is_cancelled(tmp_path: Path) -> None:
    files = files_in(tmp_path, Hand())
    stuck = asyncio.Event()

    async def chunks():  # type: ignore[no-untyped-def]
        for piece in PIECES[:-20]:
            yield piece
        await stuck.wait()

    async def run() -> None:
        async with files.uploading("alice") as up:
            await up.take(chunks())

    task = asyncio.ensure_future(run())
    await wait_until(lambda: kept(tmp_path), what="a part in the store")
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled() and kept(tmp_path) == []


async def test_how_many_transfers_are_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_api, "USER_TRANSFERS_MAX", 1)
    monkeypatch.setattr(files_api, "TRANSFERS_MAX", 2)
    async with keeping(tmp_path) as s:
        id = (await upload(s.app, body=form())).json["id"]
        path = "/v1/files"
        async with (
            Exchange(s.app, "POST", path, [form()[:90]], [bearer(ALICE), FORM], stalls=True) as one,
            Exchange(s.app, "POST", path, [form()[:90]], [bearer(BOB), FORM], stalls=True) as two,
        ):
            await wait_until(lambda: one.received and two.received, what="both have begun")
            for key in (ALICE, BOB):
                e = await upload(s.app, key, form())
                assert e.status == 429 and e.headers["retry-after"] == "1"
            assert (await get(s.app, f"/v1/files/{id}/content")).status == 429
            assert (await get(s.app, f"/v1/files/{id}")).status == 200
            monkeypatch.setattr(files_api, "USER_TRANSFERS_MAX", 9)
            full = await upload(s.app, BOB, form())
            assert full.status == 503 and full.headers["retry-after"] == "1"
        assert (await upload(s.app, body=form())).status == 200, "all have ended"


async def test_a_store_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    async with keeping(tmp_path / "file") as s:
        for body in (form(), PIECES):
            e = await upload(s.app, body=body)
            assert e.status == 503 and 1 <= int(e.headers["retry-after"]) <= 60
            assert error(e)["type"] == "server_error" and str(tmp_path) not in e.body.decode()
        assert "store of files" in caplog.text and "internal error" not in caplog.text


async def test_a_store_that_breaks_within_an_upload(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    async with keeping(root) as s:
        assert (await upload(s.app, body=form())).status == 200
        (folder,) = {p.parent for p in kept(root)}
        folder.rename(tmp_path / "away")
        folder.write_text("in the way")
        assert (await upload(s.app, body=PIECES)).status == 503
        assert (await get(s.app, "/v1/files/file-" + "0" * 44)).status in (404, 503)


async def test_a_download_that_cannot_be_whole(tmp_path: Path) -> None:
    """What came is not taken for all: the answer is cut off."""
    async with keeping(tmp_path) as s:
        id = (await upload(s.app, body=PIECES)).json["id"]
        (content,) = (p for p in kept(tmp_path) if p.name == id)
        os.truncate(content, 5 << 19)
        e = await get(s.app, f"/v1/files/{id}/content")
        assert e.status == 200 and len(e.body) == 2 << 20 and not e.complete
        content.unlink()
        e = await get(s.app, f"/v1/files/{id}/content")
        assert e.body == b"" and not e.complete


async def test_a_download_whose_client_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing more is read for it: not the part that is missing."""
    async with keeping(tmp_path) as s:
        id = (await upload(s.app, body=PIECES)).json["id"]
        (content,) = (p for p in kept(tmp_path) if p.name == id)
        os.truncate(content, 5 << 19)
        path = f"/v1/files/{id}/content"
        async with Exchange(s.app, "GET", path, headers=[bearer(ALICE)], reads=False) as e:
            await pass_turns()
            e.leave()
            await e.until_over()
        assert "store of files" not in caplog.text
        async with Exchange(s.app, "GET", path, headers=[bearer(ALICE)]) as e:
            await e.until_over()
        assert "store of files" in caplog.text


async def pass_turns() -> None:
    """Let the other side go as far as it can."""
    for _ in range(50):
        await asyncio.to_thread(int)
