"""The object store: whole or absent, in order, bounded, and its errors."""

import asyncio
import re
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ConfigError, StoreError
from common.store import BLOCK_BYTES, PART_BYTES, SMALL_BYTES_MAX, Store
from common.store_feed import PIECE_BYTES, Feed, pieces
from common.store_text import error_text
from tests.support.files import kept
from tests.support.s3 import s3
from tests.support.wait import wait_until

UNREACHABLE = {
    "aws_endpoint": "http://127.0.0.1:9",
    "aws_region": "x",
    "aws_access_key_id": "AKSECRET",
    "aws_secret_access_key": "SKSECRET",
}


async def chunks(*parts: bytes, fails: bool = False) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
    if fails:
        raise KeyError("of the caller")


def tree(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def joined(store: Store, path: str, start: int, end: int) -> bytes:
    return b"".join([b async for b in store.read(path, start, end)])


@pytest.fixture(params=["file", "memory", "s3"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "s3":
        async with s3() as (fake, options):
            yield Store("s3://bucket/pre/fix", options)
            assert fake.uploads == {}, "parts that nobody will ever complete"
            assert all(key.startswith("pre/fix/") for key in fake.objects)
    else:
        yield Store(f"file://{tmp_path}/store" if request.param == "file" else "memory:///")


async def test_before_the_first_object_there_is_nothing(store: Store, tmp_path: Path) -> None:
    assert await store.get("a/b") is None and await store.size("a/b") is None
    assert await store.list("a") == []
    with pytest.raises(StoreError):
        await joined(store, "a/b", 0, 1)
    assert tree(tmp_path) == [], "looking makes no directory"


@pytest.mark.parametrize(
    "size", [0, 1, PIECE_BYTES, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 7]
)
async def test_what_is_written_is_read(store: Store, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    parts = [data[i : i + 300_001] for i in range(0, size, 300_001)]
    assert await store.write("a/b", chunks(*parts)) == size
    assert await store.size("a/b") == size
    assert await joined(store, "a/b", 0, size) == data
    middle = size // 3, size - size // 5
    assert await joined(store, "a/b", *middle) == data[slice(*middle)]
    blocks = [len(b) async for b in store.read("a/b", 0, size)]
    assert all(n == BLOCK_BYTES for n in blocks[:-1])


async def test_small_objects(store: Store) -> None:
    await store.put("a/b", b"one")
    await store.put("a/b", b"two")
    assert await store.get("a/b") == b"two"
    assert await store.delete("a/b")
    assert await store.get("a/b") is None
    await store.delete("a/b")
    await store.put("a/large", b"x" * (SMALL_BYTES_MAX + 1))
    with pytest.raises(StoreError):
        await store.get("a/large")


@pytest.mark.parametrize("chunk", [1, 1_000])
async def test_lists_are_in_order_and_bounded(
    store: Store, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory is not read in order, and yet listed so."""
    monkeypatch.setattr("common.store.LIST_CHUNK", chunk)
    for name in ("c", "b/x", "a", "d", "b/a"):
        await store.put(f"top/{name}", name.encode() * 3)
    await store.put("top2/e", b"")
    found = await store.list("top")
    assert [f.path for f in found] == ["top/a", "top/b/a", "top/b/x", "top/c", "top/d"]
    assert [f.size for f in found] == [3, 9, 9, 3, 3] and all(f.modified > 1e9 for f in found)
    assert [f.path for f in await store.list("top", limit=2)] == ["top/a", "top/b/a"]
    assert [f.path for f in await store.list("top", "top/b/a", 2)] == ["top/b/x", "top/c"]
    assert await store.list("top", "top/d") == []


@pytest.mark.parametrize("size", [1_000, 4 * PART_BYTES])
async def test_what_the_caller_raises_ends_an_upload(store: Store, size: int) -> None:
    parts = [b"x" * 100_000] * (size // 100_000)
    with pytest.raises(KeyError):
        await store.write("a/b", chunks(*parts, fails=True))
    assert await store.list("a") == []


async def test_a_cancelled_upload_leaves_nothing_and_nobody(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    stuck = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * PIECE_BYTES
        await stuck.wait()

    before = asyncio.all_tasks()
    task = asyncio.ensure_future(store.write("a/b", endless()))
    await wait_until(lambda: list(tmp_path.rglob("*#*")), what="parts")
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    assert kept(tmp_path) == []
    await wait_until(lambda: asyncio.all_tasks() == before, what="no task is left")


async def test_a_cancelled_upload_leaves_no_parts_in_a_bucket() -> None:
    stuck = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(12):
            yield b"x" * PIECE_BYTES
        await stuck.wait()

    async with s3() as (fake, options):
        task = asyncio.ensure_future(Store("s3://bucket", options).write("a/b", endless()))
        await wait_until(lambda: any(fake.uploads.values()), what="a part")
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled() and fake.uploads == {} and fake.objects == {}


async def test_cancelled_anywhere_an_object_is_whole_or_absent(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    data = b"x" * PIECE_BYTES
    count, seen = 8, set()
    for turns in range(0, 60, 3):
        task = asyncio.ensure_future(store.write(f"a/{turns}", chunks(*[data] * count)))
        for _ in range(turns):
            await asyncio.sleep(0)
            await asyncio.to_thread(int)  # let the store's threads come forward
        task.cancel()
        await asyncio.wait((task,))
        found = [(p.name, p.stat().st_size) for p in kept(tmp_path)]
        assert all(n == f"{turns}" and size == count * PIECE_BYTES for n, size in found)
        seen.add(len(found))
        for path in kept(tmp_path):
            path.unlink()
    assert 0 in seen


async def test_a_directory_of_its_owner_alone(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    store = Store(f"file://{root}")
    for size in (0, PART_BYTES * 2):
        await store.write("a", chunks(b"x" * size))
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        shutil.rmtree(root)
        assert await store.list("") == [], "it may be removed meanwhile"


async def test_a_directory_that_must_be_there(tmp_path: Path) -> None:
    root = tmp_path / "root"
    store = Store(f"file://{root}", make=False)
    for _ in range(2):  # before it is opened first, and after
        for call in (
            store.put("a", b"x"), store.write("a", chunks(b"x")), store.get("a"), store.size("a"),
            store.list(""), store.delete("a"), anext(aiter(store.read("a", 0, 1))),
        ):  # fmt: skip
            with pytest.raises(StoreError, match="is not there"):
                await call
        assert not root.exists()
        root.mkdir()
        await store.put("a", b"x")
        assert await store.get("a") == b"x" and await store.get("b") is None
        shutil.rmtree(root)


async def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    await Store().put("a", b"x")
    assert (tmp_path / "fairlane" / "store" / "a").read_bytes() == b"x"


@pytest.mark.parametrize("big", [False, True])
async def test_a_directory_that_cannot_be(tmp_path: Path, big: bool) -> None:
    (tmp_path / "file").write_text("")
    store = Store(f"file://{tmp_path}/file/store")
    with pytest.raises(StoreError):
        await store.write("a", chunks(b"x" * (PART_BYTES * 3 if big else 3)))
    with pytest.raises(StoreError):
        await store.put("a", b"")


async def test_an_upload_whose_store_fails_reads_no_further(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    (tmp_path / "a").write_text("in the way")
    taken = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal taken
        while taken < 500:
            taken += 1
            yield b"x" * PIECE_BYTES
            await asyncio.to_thread(int)

    with pytest.raises(StoreError):
        await store.write("a/b", endless())
    assert taken < 500


async def test_a_store_out_of_reach_tells_no_secret() -> None:
    store = Store("s3://bucket/prefix", UNREACHABLE)
    calls = (
        store.put("a", b"x"), store.get("a"), store.size("a"), store.delete("a"), store.list("a"),
        store.write("a", chunks(b"x" * PART_BYTES * 2)), joined(store, "a", 0, 1),
    )  # fmt: skip
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, StoreError)
        assert "SECRET" not in str(error) and "\n" not in str(error)
        assert not re.search(r"\?[^…]", str(error)), "no query of a URL"


@pytest.mark.parametrize(
    "place",
    ["PUT http://169.254.169.254/latest/api/token", "GET http://169.254.169.254/metadata?x=y"],
)
def test_a_store_without_credentials_is_said_to_have_none(place: str) -> None:
    """Obstore's text is of the address where it looks last."""
    e = OSError(f"Generic S3 error: Error performing {place} in 1.4ms - status code: 403 Forbidden")
    text = error_text(e)
    assert text.startswith("no credentials for the store: ") and "169.254" not in text


async def test_a_bucket_that_is_not_there_is_no_missing_object() -> None:
    async with s3() as (fake, options):
        store = Store("s3://bucket", options)
        assert await store.get("a") is None and await store.size("a") is None
        fake.gone = True
        calls = (
            store.put("a", b"x"), store.get("a"), store.delete("a"), store.list("a"),
            store.size("a"), joined(store, "a", 0, 1),
        )  # fmt: skip
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, StoreError) and str(error) == "the bucket is not there"


async def test_a_store_that_is_silent_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listens:
        url = f"http://127.0.0.1:{listens.getsockname()[1]}"
        store = Store("s3://bucket", UNREACHABLE | {"aws_endpoint": url})
        monkeypatch.setattr("common.store._CALL_S", 0.2)
        calls = (store.put("a", b"x"), store.get("a"), store.delete("a"), store.list("a"))
        for error in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(error, StoreError) and str(error) == "the store does not answer"


@pytest.mark.parametrize("options", [{"aws_nope": "x"}, {"google_bucket": "x"}])
def test_options_that_are_none(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        Store("s3://bucket", options)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, PIECE_BYTES * 2), max_size=8))
def test_pieces_are_the_same_bytes(sizes: list[int]) -> None:
    parts = [bytes([i]) * n for i, n in enumerate(sizes)]

    async def run() -> list[bytes]:
        return [p async for p in pieces(chunks(*parts))]

    made = asyncio.run(run())
    assert b"".join(made) == b"".join(parts)
    assert all(len(p) >= PIECE_BYTES for p in made[:-1]) and all(made)


async def test_nobody_waits_for_a_feed_whose_reader_is_gone() -> None:
    feed = Feed()
    assert await feed.push(b"a")
    waiting = asyncio.ensure_future(feed.push(b"b"))
    await asyncio.sleep(0)
    feed.over(None)
    assert not await waiting and not await feed.push(None)
