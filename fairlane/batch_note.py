"""The note beside a batch run's answers: what of it is at the gateway, and who has it in hand.

The note is locked as long as a run goes on, by the kernel, so that the lock ends with its process
however that ends. It is written in place: another file renamed over it would not be locked.
"""

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from fairlane.api import ApiError

BYTES_MAX = 1 << 16
OPENED_MAX = 10
"""The note of a run that ends just now is opened so often."""


class Note(msgspec.Struct, kw_only=True):
    """What is known of a run that was begun."""

    url: str
    digest: str
    """SHA-256 of the input."""
    file: str = ""
    batch: str = ""


class NoteFile:
    """The note of one run; a context, in which this process alone has it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._left = False
        """Whether the file stays, or is not there, when this process has done with it."""

    def __enter__(self) -> "NoteFile":
        """Raises ApiError where another process has it, and OSError."""
        for _ in range(OPENED_MAX):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._fd)
                text = f"another run has {self.path} in hand: wait for it, or choose another --out"
                raise ApiError(text) from None
            except OSError:
                return self  # a file system without locks
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._fd), self.path.stat()):
                    return self
            os.close(self._fd)  # the note of a run that has ended meanwhile
        raise ApiError(f"{self.path} is made and removed by others all the time")

    def __exit__(self, *exc: object) -> None:
        """One that says nothing is removed."""
        if not self._left:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def read(self) -> Note | None:
        """What it says; None: nothing. Raises ApiError where it is no note."""
        data = os.pread(self._fd, BYTES_MAX, 0)
        if not data:
            return None
        self._left = True
        try:
            return msgspec.json.decode(data, type=Note)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            text = f"{self.path} is no note of a run: remove it, or choose another --out"
            raise ApiError(text) from None

    def save(self, note: Note) -> None:
        """Over what it says; a note only grows, so at no moment is it cut short. Raises OSError."""
        data = msgspec.json.encode(note)
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))
        self._left = True

    def drop(self) -> None:
        """The run is over: remove it. Raises OSError."""
        self.path.unlink(missing_ok=True)
        self._left = True
