"""The Redis server that other tests rest on: its own port and folder, and no process left."""

import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.redis_server import RedisServer, find_redis_server, free_port
from tests.support.wait import wait_until_sync

pytestmark = pytest.mark.processes


def ask(server: RedisServer, *words: str, timeout: float = 2.0) -> bytes:
    """One command on a connection of its own, in Redis's inline form."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=timeout) as link:
        link.sendall(" ".join(words).encode() + b"\r\n")
        return link.recv(4096)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer(appendonly=True) as running:
        yield running


def test_starts_with_safe_options_and_leaves_nothing() -> None:
    with RedisServer() as server:
        pid, folder = server.pid, server.dir
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        assert b"noeviction" in ask(server, "CONFIG", "GET", "maxmemory-policy")
        assert b"$0\r\n" in ask(server, "CONFIG", "GET", "save")
        assert folder.is_dir()
    assert not alive(pid)
    assert not folder.exists()


def test_two_servers_do_not_meet() -> None:
    with RedisServer() as one, RedisServer() as two:
        assert one.port != two.port
        assert one.dir != two.dir
        ask(one, "SET", "a", "1")
        assert ask(two, "GET", "a") == b"$-1\r\n"


def test_more_options_reach_the_server() -> None:
    with RedisServer(config={"client-output-buffer-limit": "pubsub 1mb 512kb 7"}) as server:
        assert b"pubsub 1048576 524288 7" in ask(
            server, "CONFIG", "GET", "client-output-buffer-limit"
        )


@pytest.mark.parametrize("kill", [False, True])
def test_restart_keeps_port_and_data(server: RedisServer, kill: bool) -> None:
    pid, port = server.pid, server.port
    assert ask(server, "SET", "a", "1") == b"+OK\r\n"
    server.restart(kill=kill)
    assert server.pid != pid
    assert server.port == port
    assert ask(server, "GET", "a") == b"$1\r\n1\r\n"


def test_without_append_only_file_a_restart_loses_everything() -> None:
    with RedisServer() as server:
        ask(server, "SET", "a", "1")
        server.restart()
        assert ask(server, "GET", "a") == b"$-1\r\n"


def test_a_paused_server_is_silent_until_resumed(server: RedisServer) -> None:
    server.pause()
    with pytest.raises(TimeoutError):
        ask(server, "PING", timeout=0.2)
    server.resume()
    assert ask(server, "PING") == b"+PONG\r\n"


def test_a_paused_server_can_be_stopped_and_killed(server: RedisServer) -> None:
    server.pause()
    server.stop()
    server.start()
    server.pause()
    pid = server.pid
    server.kill()
    assert not alive(pid)
    with pytest.raises(RuntimeError, match="not running"):
        _ = server.pid


def test_a_stolen_port_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        stolen = thief.getsockname()[1]
        ports = iter([stolen, free_port()])
        monkeypatch.setattr("tests.support.redis_server.free_port", lambda: next(ports))
        with RedisServer() as server:
            assert server.port != stolen
            assert ask(server, "PING") == b"+PONG\r\n"


def test_a_bad_option_says_why() -> None:
    server = RedisServer(config={"maxmemory-policy": "no-such-policy"})
    with pytest.raises(RuntimeError, match="no-such-policy"):
        server.start()
    folder = server.dir
    server.close()
    server.close()
    assert not folder.exists()


def test_a_forgotten_server_ends_with_its_object() -> None:
    server = RedisServer()
    server.start()
    pid = server.pid
    del server
    gc.collect()
    assert not alive(pid)


def test_a_server_ends_with_the_process_that_forgot_it() -> None:
    code = (
        "from tests.support.redis_server import RedisServer\n"
        "server = RedisServer(); server.start(); print(server.pid, server.dir)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    pid, folder = done.stdout.split()
    wait_until_sync(lambda: not alive(int(pid)), what="the end of the forgotten server")
    assert not Path(folder).exists()


def test_the_server_found_is_recent_enough() -> None:
    words = subprocess.run([find_redis_server(), "--version"], capture_output=True, check=True)
    assert b"v=" in words.stdout
