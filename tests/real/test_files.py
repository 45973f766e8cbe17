"""A gateway as a process, and a file that it could not hold in memory."""

import hashlib
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.files import FORM, form, kept
from tests.support.processes import Role
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.processes
MIB = 1 << 20
SIZE = 200 * MIB
GROWTH_MAX = 150 * MIB
_LINE = b'{"custom_id":"r","method":"POST","url":"/v1/chat/completions","body":{"model":"m"}}\n'


@pytest.fixture
def gateway(redis_server: RedisServer, tmp_path: Path) -> Iterator[Role]:
    config = tmp_path / "fairlane.toml"
    (tmp_path / "store").mkdir()
    config.write_text(f'[gateway]\ndrain_s = 1\n[store]\nurl = "file://{tmp_path / "store"}"\n')
    args = ["gateway", "--config", str(config), "--redis", redis_server.url, "--port", "0"]
    role = Role("gateway", args, tmp_path)
    role.start()
    try:
        role.wait_ready("/healthz")
        yield role
    finally:
        role.close()


def peak(role: Role) -> int:
    """Most bytes of memory that it has ever held."""
    status = Path(f"/proc/{role.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def test_200_mb_up_and_down(gateway: Role, tmp_path: Path) -> None:
    block = (_LINE * (MIB // len(_LINE) + 1))[:MIB]
    ends = form(b"\0").split(b"\0")
    sent, got = hashlib.sha256(), hashlib.sha256()

    def body() -> Iterator[bytes]:
        yield ends[0]
        for n in range(SIZE // MIB):
            piece = n.to_bytes(4, "big") + block[4:]
            sent.update(piece)
            yield piece
        yield ends[1]

    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as client:
        small = client.post("/v1/files", content=form(), headers=dict([FORM]))
        assert small.status_code == 200, small.text
        before = peak(gateway)
        made = client.post("/v1/files", content=body(), headers=dict([FORM]))
        assert made.status_code == 200, made.text
        assert made.json()["bytes"] == SIZE
        with client.stream("GET", f"/v1/files/{made.json()['id']}/content") as answer:
            for piece in answer.iter_bytes(MIB):
                got.update(piece)
        growth = peak(gateway) - before
        print(f"peak memory grew by {growth / MIB:.1f} MiB")
        assert got.digest() == sent.digest()
        assert growth < GROWTH_MAX
        assert client.delete(f"/v1/files/{made.json()['id']}").json()["deleted"]
    assert len(kept(tmp_path / "store")) == 2, "the small one's"


def test_an_upload_open_at_sigterm_leaves_nothing(gateway: Role, tmp_path: Path) -> None:
    pieces = [form()[:200], *[b"x" * MIB] * 8]

    def body() -> Iterator[bytes]:
        yield from pieces
        gateway.send(signal.SIGTERM)
        assert gateway.ended(60) == 0
        yield b"x"

    with httpx.Client(base_url=gateway.url, timeout=60, trust_env=False) as client:
        e = client.post("/v1/files", content=body(), headers=dict([FORM]))
    assert e.status_code == 503 and e.headers["retry-after"]
    assert "internal error" not in gateway.log()
    assert kept(tmp_path / "store") == []
