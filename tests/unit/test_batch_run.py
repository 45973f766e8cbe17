"""`fairlane batch run` beside a gateway that is a table of answers, in virtual time."""

import fcntl
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fairlane import batch_watch
from fairlane.api import Api, ApiError
from fairlane.batch_note import Note, NoteFile
from fairlane.batch_run import Run

LINE = json.dumps({"custom_id": "a", "url": "/v1/embeddings", "body": {}}) + "\n"
DAY_S = 86_400.0
NOW_S = 1_800_000_000.0
Look = Callable[[float], tuple[str, int]]


class Gateway:
    """Takes one file and makes one batch of it. `look(t)`: the batch's status and how many of its
    10 lines are done at this time since the start; it may raise httpx's errors, or end the
    process."""

    def __init__(self, look: Look) -> None:
        self.look, self.t = look, 0.0
        self.asked: list[str] = []
        self.refuses: dict[str, int] = {}
        """Statuses, by request."""

    def wait(self, seconds: float) -> None:
        self.t += seconds

    def answer(self, request: httpx.Request) -> httpx.Response:
        what = f"{request.method} {request.url.path}"
        request.read()
        self.asked.append(what)
        if what in self.refuses:
            error = {"error": {"message": "This window is none."}}
            return httpx.Response(self.refuses[what], json=error)
        if what == "GET /v1/batches":
            return httpx.Response(200, json={"data": []})
        if what == "GET /v1/files/out/content":
            return httpx.Response(200, content=b"answers\n")
        if what == "GET /v1/batches/b":
            status, done = self.look(self.t)
            return httpx.Response(200, json=self._batch(status, done))
        return httpx.Response(200, json={"id": "b" if "batches" in what else "in"})

    def _batch(self, status: str, done: int) -> dict[str, Any]:
        counts = {"completed": done, "failed": 0, "total": 10}
        over = {"output_file_id": "out"} if status == "completed" else {}
        return {
            "id": "b", "status": status, "request_counts": counts,
            "expires_at": NOW_S + DAY_S, **over,
        }  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text(LINE * 10)
    return path


def begun(gateway: Gateway, source: Path, *, overwrite: bool = False) -> bool:
    """A run to its end, its answers in `out`."""
    api = Api("http://gateway", None)
    transport = httpx.MockTransport(gateway.answer)
    api._http = httpx.Client(base_url="http://gateway", transport=transport)
    out = source.with_name("out")
    return Run(
        api, "http://gateway", source, out, out.with_name("out.errors"), endpoint=None,
        window="24h", keep=False, overwrite=overwrite, wait=gateway.wait, now=lambda: gateway.t,
        today=lambda: NOW_S + gateway.t,
    ).run()  # fmt: skip


def away(*spans: tuple[float, float], end_s: float = 700.0) -> Look:
    """A gateway that is not there within these times; its batch ends at `end_s`."""

    def look(t: float) -> tuple[str, int]:
        if any(start <= t < end for start, end in spans):
            raise httpx.ConnectError("Connection refused")
        return ("completed", 10) if t >= end_s else ("in_progress", min(9, int(t / end_s * 10)))

    return look


def test_a_gateway_that_is_away_is_told_of(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(away((5, 305), (400, 990), end_s=1_000))
    assert begun(gateway, source)
    told = [x for x in capsys.readouterr().err.splitlines() if "does not answer" in x]
    assert told[0] == (
        "http://gateway does not answer: Connection refused: tried again for up to 10 min"
    )
    assert 890 / batch_watch.SAY_S / 2.5 <= len(told) <= 890 / batch_watch.SAY_S + 2
    assert "for up to 5 min" in "".join(told), "how long it will still be waited for"
    assert source.with_name("out").read_bytes() == b"answers\n"


def test_a_gateway_that_stays_away_ends_it(source: Path) -> None:
    gateway = Gateway(away((5, 1e9)))
    with pytest.raises(ApiError) as caught:
        begun(gateway, source)
    assert caught.value.exit_code == 2
    assert caught.value.message.endswith("for 10 min now. The batch goes on: the same command "
                                         "takes it up again")  # fmt: skip
    assert batch_watch.PATIENCE_S <= gateway.t - 5 <= batch_watch.PATIENCE_S + 30
    gateway.look = away()
    assert begun(gateway, source)
    assert gateway.asked.count("POST /v1/batches") == 1


def test_a_batch_that_no_worker_takes_is_told_of(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(lambda t: ("validating", 0) if t < 300 else ("completed", 10))
    assert begun(gateway, source)
    told = [x for x in capsys.readouterr().err.splitlines() if "batch-worker" in x]
    assert told[0].startswith("validating for 15 s: no worker has taken it yet")
    assert len(told) == 5


def test_lines_that_do_not_move_are_told_of(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gateway = Gateway(lambda t: ("in_progress", 3) if t < 900 else ("completed", 10))
    assert begun(gateway, source)
    told = [x for x in capsys.readouterr().err.splitlines() if "nothing new" in x]
    assert [x.partition(" nothing")[0] for x in told] == [
        "in_progress, and for 2 min", "in_progress, and for 12 min"
    ]  # fmt: skip


def test_without_a_terminal_it_is_told_how_far_it_is(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert begun(Gateway(away(end_s=1_000)), source)
    told = [x for x in capsys.readouterr().err.splitlines() if x.startswith("in_progress: ")]
    assert told[0] == "in_progress: 0 of 10 lines" and told[-1] == "in_progress: 9 of 10 lines"
    assert len(told) <= 1_000 / batch_watch.SHOWN_S + 2


def test_a_batch_that_nothing_ends_is_not_waited_for_without_end(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_watch, "POLL_S", 60.0)
    gateway = Gateway(lambda t: ("validating", 0))
    with pytest.raises(ApiError, match=r"nothing ends it.*takes it up again"):
        begun(gateway, source)
    assert DAY_S < gateway.t < DAY_S + batch_watch.GRACE_S + 120


def left(source: Path) -> set[str]:
    """What there is beside the input."""
    return {p.name for p in source.parent.iterdir()} - {source.name}


def test_nothing_is_left_of_a_batch_that_is_refused(source: Path) -> None:
    gateway = Gateway(away())
    gateway.refuses["POST /v1/batches"] = 400
    with pytest.raises(ApiError, match="window is none"):
        begun(gateway, source)
    assert left(source) == set() and gateway.asked[-1] == "DELETE /v1/files/in"
    gateway.refuses = {"POST /v1/files": 413}
    with pytest.raises(ApiError, match="413"):
        begun(gateway, source)
    assert left(source) == set()


def test_what_may_be_taken_later_is_not_begun_anew(source: Path) -> None:
    gateway = Gateway(away())
    gateway.refuses["POST /v1/batches"] = 429
    with pytest.raises(ApiError, match="input is with the gateway: the same command takes it up"):
        begun(gateway, source)
    assert left(source) == {"out.run"}
    gateway.refuses = {}
    assert begun(gateway, source) and left(source) == {"out"}
    assert gateway.asked.count("POST /v1/files") == 1


def test_two_runs_at_once(source: Path) -> None:
    """The second ends at once, and neither takes the other's note."""
    second: list[str] = []

    def look(t: float) -> tuple[str, int]:
        if not second:
            with pytest.raises(ApiError) as caught:
                begun(Gateway(away()), source)
            second.append(caught.value.message)
        return "completed", 10

    assert begun(Gateway(look), source)
    assert second == [
        f"another run has {source.with_name('out.run')} in hand: wait for it, or choose another "
        "--out"
    ]
    assert left(source) == {"out"}


def test_a_run_that_ends_while_another_opens_its_note(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other does not hold a file that is no longer there."""
    path = source.with_name("out.run")
    path.touch()
    flock = fcntl.flock
    ends = [path.unlink]

    def late(fd: int, how: int) -> None:
        if ends:
            ends.pop()()
        flock(fd, how)

    monkeypatch.setattr("fairlane.batch_note.fcntl.flock", late)
    with NoteFile(path) as second:
        second.save(Note(url="u", digest="e"))
    assert json.loads(path.read_bytes())["digest"] == "e"


@pytest.mark.parametrize("name", ["out", "out.errors"])
def test_answers_are_not_written_over_unasked(source: Path, name: str) -> None:
    path = source.with_name(name)
    path.write_text("dear")
    gateway = Gateway(away())
    with pytest.raises(ApiError, match=f"{name} is there already: with --overwrite"):
        begun(gateway, source)
    assert path.read_text() == "dear" and gateway.asked == [] and left(source) == {name}
    assert begun(gateway, source, overwrite=True)
    assert left(source) == {"out"} and source.with_name("out").read_text() == "answers\n"


def test_an_empty_file_that_was_made_for_the_answers(source: Path) -> None:
    source.with_name("out").touch()
    assert begun(Gateway(away()), source)


def test_a_kill_between_the_answers_and_the_end(source: Path) -> None:
    """The note goes before the files that it names."""
    gateway = Gateway(away())
    gateway.refuses["DELETE /v1/files/in"] = 503
    notes: list[bool] = []
    answer = gateway.answer

    def seen(request: httpx.Request) -> httpx.Response:
        if request.method == "DELETE":
            notes.append(source.with_name("out.run").exists())
        return answer(request)

    gateway.answer = seen  # type: ignore[method-assign]
    assert begun(gateway, source)
    assert notes == [False, False]


@pytest.mark.parametrize("text", ["", "\n\r\n", "\ufeff"])
def test_an_input_without_lines(source: Path, text: str) -> None:
    source.write_text(text)
    gateway = Gateway(away())
    with pytest.raises(ApiError, match="is empty"):
        begun(gateway, source)
    assert gateway.asked == [] and left(source) == set()


def test_a_file_that_is_no_note(source: Path) -> None:
    source.with_name("out.run").write_text("my own")
    with pytest.raises(ApiError, match="no note of a run"):
        begun(Gateway(away()), source)
    assert source.with_name("out.run").read_text() == "my own"
