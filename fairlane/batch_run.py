"""`fairlane batch run`: a file of requests through the Batch API, and its answers into a file.

Everything that must outlive this process is with the gateway; beside the answers' file a small note
says which file and batch there belong to the input, so that the same command, given again, goes on
where it was. Nothing is uploaded or asked twice.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
from rich.console import Console

from common.clock import monotonic, wall
from fairlane.api import LATER, Api, ApiError
from fairlane.batch_note import Note, NoteFile
from fairlane.batch_watch import POLL_S, Watch

BLOCK = 1 << 20
DOWNLOADS = 5
"""A download that breaks is begun again so often."""


REFUSED = (400, 413, 422)
"""Statuses of what would be refused again."""


class Run:
    """One input file on its way."""

    def __init__(
        self, api: Api, url: str, source: Path, out: Path, errors: Path, *, endpoint: str | None,
        window: str, keep: bool, overwrite: bool, wait: Callable[[float], object],
        now: Callable[[], float] = monotonic, today: Callable[[], float] = wall,
    ) -> None:  # fmt: skip
        """`wait`, `now` and `today`: the time, as in Watch."""
        self._api, self._url = api, url
        self._source, self._out, self._errors = source, out, errors
        self._endpoint, self._window = endpoint, window
        self._keep, self._overwrite = keep, overwrite
        self._wait = wait
        self._note_path = out.with_name(out.name + ".run")
        console = Console(stderr=True)
        self._watch = Watch(api, console, wait=wait, now=now, today=today)

    def run(self) -> bool:
        """To the end; True: every line has an answer. Raises ApiError."""
        try:
            self._check_places()
            with NoteFile(self._note_path) as note_file:
                return self._run(note_file)
        except OSError as e:
            name = f"{e.filename}: " if e.filename else ""
            raise ApiError(f"{name}{e.strerror or e}") from None

    def _check_places(self) -> None:
        """Before anything is sent: what cannot be written at the end was asked in vain."""
        taken = {self._source.resolve(): str(self._source)}
        for path in (self._out, self._errors, self._note_path):
            if not os.access(path.parent, os.W_OK):
                raise ApiError(f"{path} cannot be written: {path.parent} is no folder to write to")
            if path.exists() and not path.is_file():
                raise ApiError(f"{path} cannot be written: it is no ordinary file")
            if other := taken.get(path.resolve()):
                raise ApiError(f"{path} would be written over {other}: choose another name")
            taken[path.resolve()] = str(path)

    def _check_new(self) -> None:
        """Answers that are there already are of lines that would be asked again."""
        for path in (self._out, self._errors):
            if not self._overwrite and path.exists() and path.stat().st_size:
                text = f"{path} is there already: with --overwrite all is asked again and it is "
                raise ApiError(text + "written over; or choose another --out")

    def _run(self, note_file: NoteFile) -> bool:
        digest, lines = self._read()
        endpoint = self._endpoint or self._first_url()
        note = self._noted(note_file, digest)
        known = bool(note.file)
        try:
            if not note.file:
                note.file = self._upload()
                note_file.save(note)
            if not note.batch:
                note.batch = self._create(note.file, endpoint)
                note_file.save(note)
            batch = self._watch.until_over(note.batch, lines)
            fine = self._fetch(batch)
        except ApiError as e:
            if e.status in REFUSED and note.file and not note.batch:
                note_file.drop()
                self._tidy(note.file)
            raise self._advised(e, note, known) from None
        note_file.drop()  # first: a note of files that are gone could not be gone on with
        self._tidy(note.file, batch.get("output_file_id"), batch.get("error_file_id"))
        return fine

    def _advised(self, e: ApiError, note: Note, known: bool) -> ApiError:
        """With what to do now."""
        text = ""
        if e.status == 404 and known:
            text = f" It is from {self._note_path}: remove that to begin anew"
        elif note.file and e.status in (0, *LATER):
            what = "The batch goes on" if note.batch else "The input is with the gateway"
            text = f". {what}: the same command takes it up again"
        return ApiError(f"{e.message}{text}", e.status)

    def _read(self) -> tuple[str, int]:
        """The input's digest, and about how many lines it has. Raises ApiError for none."""
        digest, lines, empty = hashlib.sha256(), 0, True
        with self._source.open("rb") as source:
            while block := source.read(BLOCK):
                digest.update(block)
                lines += block.count(b"\n")
                empty = empty and not block.removeprefix(b"\xef\xbb\xbf").strip()
        if empty:
            raise ApiError(f"{self._source} is empty: there is no line to send")
        return digest.hexdigest(), max(1, lines)

    def _noted(self, note_file: NoteFile, digest: str) -> Note:
        note = note_file.read()
        if note is None:
            self._check_new()
            return Note(url=self._url, digest=digest)
        if note.digest != digest:
            text = f"{self._note_path} is of another input: remove it, or choose another --out"
            raise ApiError(text)
        if note.url != self._url:
            raise ApiError(f"{self._note_path} is of a run at {note.url}: give that as --url")
        self._watch.say(f"going on with batch {note.batch or '(not yet made)'}")
        return note

    def _upload(self) -> str:
        size = self._source.stat().st_size
        with self._watch.progress() as progress, self._source.open("rb") as source:
            watched = progress.wrap_file(source, size, description="uploading")
            answer = self._api.post(
                "/v1/files",
                data={"purpose": "batch"},
                files={"file": (self._source.name, watched, "application/jsonl")},
                timeout=httpx.Timeout(600.0, connect=10.0),
            )
        return str(answer["id"])

    def _create(self, file: str, endpoint: str) -> str:
        for batch in self._api.get("/v1/batches", limit=100)["data"]:
            if batch.get("input_file_id") == file:  # made, and then this process was killed
                return str(batch["id"])
        answer = self._api.post(
            "/v1/batches",
            json={
                "input_file_id": file, "endpoint": endpoint, "completion_window": self._window,
            },
        )  # fmt: skip
        self._watch.say(f"batch {answer['id']}: {endpoint}")
        return str(answer["id"])

    def _first_url(self) -> str:
        """The endpoint of the first line: all lines of a batch have one."""
        with self._source.open("rb") as source:
            lines = (line.lstrip(b"\xef\xbb\xbf").strip() for line in source)
            line = next((line for line in lines if line), b"")
        try:
            return str(msgspec.json.decode(line)["url"])
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
            text = f"the first line of {self._source} has no `url`: give --endpoint"
            raise ApiError(text) from None

    def _fetch(self, batch: dict[str, Any]) -> bool:
        """Write the files of a batch that is over, and leave none of a run before it; True: every
        line has an answer."""
        for name, path in (("output_file_id", self._out), ("error_file_id", self._errors)):
            if batch.get(name):
                self._download(batch[name], path)
            else:
                path.unlink(missing_ok=True)
        if batch["status"] == "completed" and not batch.get("output_file_id"):
            self._out.write_bytes(b"")
        for error in ((batch.get("errors") or {}).get("data") or [])[:20]:
            where = f"line {error['line']}: " if error.get("line") else ""
            self._watch.say(f"{where}{error.get('message')}")
        counts = batch.get("request_counts") or {}
        self._watch.say(
            f"{batch['status']}: {counts.get('completed', 0)} of {counts.get('total', 0)} lines "
            f"answered, {counts.get('failed', 0)} failed"
        )
        return batch["status"] == "completed" and not counts.get("failed")

    def _download(self, file: str, path: Path) -> None:
        """Whole or not at all."""
        part = path.with_name(path.name + ".part")
        for left in range(DOWNLOADS - 1, -1, -1):
            try:
                content = self._api.stream(f"/v1/files/{file}/content")
                with content as answer, part.open("wb") as out:
                    for block in answer.iter_bytes(BLOCK):
                        out.write(block)
                break
            except (httpx.HTTPError, ApiError) as e:
                if not left:
                    text = f"{path} cannot be fetched: {e}"
                    raise ApiError(text, getattr(e, "status", 0)) from None
                self._wait(POLL_S)
                self._watch.get(f"/v1/files/{file}")  # once there is a gateway again
        part.replace(path)

    def _tidy(self, *files: str | None) -> None:
        for file in files:
            if file and not self._keep:
                try:
                    self._api.delete(f"/v1/files/{file}")
                except ApiError as e:
                    self._watch.say(f"file {file} stays with the gateway: {e}")
