"""A watched file: whole or half, good or bad, there or not."""

import asyncio
import logging
import os
from pathlib import Path

import pytest

from common.config import parse_backends
from common.errors import ConfigError
from common.settings import BackendSettings
from common.watched import FILE_BYTES_MAX, Contents, Watched
from tests.support.wait import pass_time, wait_until


def parse(data: bytes) -> str:
    if data.startswith(b"bad"):
        raise ConfigError(data.decode())
    return data.decode()


def test_contents_count_once_they_were_the_same_twice() -> None:
    c = Contents(parse)
    assert c.told(b"half") is None
    assert c.told(b"half and whole") is None, "it is being written"
    assert c.told(b"half and whole") == "half and whole"
    assert c.told(b"half and whole") is None, "it is no news"
    assert not c.problem


def test_bad_contents_are_told_of_and_forgotten_when_they_go() -> None:
    c = Contents(parse)
    for _ in range(2):
        first = c.told(b"one")
    assert first == "one"
    for _ in range(3):
        assert c.told(b"bad") is None
    assert c.problem == "bad"
    c.missing("gone")
    assert c.problem == "gone"
    assert c.told(b"one") is None and not c.problem, "as it was before"
    assert c.told(b"bad", settled=True) is None and c.problem == "bad"
    assert c.told(b"two", settled=True) == "two" and not c.problem, "at once where it is whole"


def test_a_file_that_was_missing_is_new_content() -> None:
    c = Contents(parse)
    c.told(b"one")
    c.missing("gone")
    assert c.told(b"one") is None, "once before it was missing and once after is not twice"
    assert c.told(b"one") == "one"


async def test_a_file_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, heard, states = tmp_path / "f", [], []
    watched = Watched(path, Contents(parse), heard.append, states.append)
    await watched.look()
    assert states == [False] and "cannot read" in caplog.text
    for text in ("one", "bad", "two"):
        path.write_text(text)
        await watched.look()
        await watched.look()
    assert heard == ["one", "two"]
    assert states[-1] is True and states[3:5] == [True, False]
    path.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    await watched.look()
    assert states[-1] is False and "more than" in caplog.text
    path.unlink()
    path.mkdir()
    await watched.look()
    assert heard == ["one", "two"] and states[-1] is False


async def test_what_is_no_regular_file_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that reads would end with the other end of the pipe, and the process with it."""
    path, heard = tmp_path / "f", []
    watched = Watched(path, Contents(parse), heard.append, lambda _: None)
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)  # ends the reader of a failed test
    try:
        async with asyncio.timeout(5):
            await watched.look()
    finally:
        os.close(writer)
    assert "no regular file" in caplog.text
    path.unlink()
    path.write_text("one")
    for _ in range(2):
        await watched.look()
    assert heard == ["one"]


@pytest.mark.looptime
async def test_what_is_wrong_is_said_once_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    watched = Watched(tmp_path / "none", Contents(parse), lambda _: None, lambda _: None)
    loop = asyncio.get_running_loop()
    began = loop.time()
    running = asyncio.ensure_future(watched.run())
    await wait_until(lambda: loop.time() - began > 150, timeout=200)
    await pass_time(1)
    assert 2 <= len(caplog.records) <= 3
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


GPU = BackendSettings(url="http://gpu:8000")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("b.toml", '[[backends]]\nurl = "http://gpu:8000"\n', [GPU]),
        ("b.toml", "backends = []", []),
        ("b.json", '{"backends": [{"url": "http://gpu:8000"}]}', [GPU]),
        ("b.JSON", '[{"url": "http://gpu:8000"}]', [GPU]),
        ("b.json", "[]", []),
    ],
)
def test_a_file_of_backends(name: str, text: str, found: list[BackendSettings]) -> None:
    assert parse_backends(text.encode(), Path(name)) == found


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("b.toml", "", "missing required field `backends`"),
        ("b.toml", "[[backends]]\nurl = ", "Invalid value"),
        ("b.toml", '[[backend]]\nurl = "http://gpu"', "did you mean `backends`?"),
        ("b.toml", '[[backends]]\nurl = "gpu"', "begins with http://"),
        ("b.json", "", "Expecting value"),
        ("b.json", "[" * 100_000, "recursion"),
        ("b.json", '[{"url": "http://gpu", "max_num_seq": 8}]', "did you mean `max_num_seqs`?"),
        ("b.json", "7", "object"),
        ("b.json", "\xff", "b.json"),
    ],
)
def test_a_file_that_is_none(name: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_backends(text.encode("latin-1"), Path(name))
    assert says in str(caught.value)
    assert str(caught.value).startswith(f"{name}: ")
