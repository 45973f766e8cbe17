"""The input file of a batch: JSON Lines of requests, as OpenAI's Batch API reads them. Pure.

Bytes are fed as they come; what is held is one line, and 16 bytes of each `custom_id`. Lines are
those of the file: blank ones count, and are nothing else. A byte order mark before a line is
dropped, for files are put together by scripts; lines may end in CR LF, and the last in nothing.
"""

import codecs
import hashlib
from collections.abc import Callable, Iterator

import msgspec

LINES_MAX = 50_000
"""Most requests of one file, as OpenAI has it."""
LINE_BYTES_MAX = 16 << 20
"""Longest line."""
ID_CHARS_MAX = 512
"""Longest `custom_id`."""
ERRORS_MAX = 100
"""Most errors kept; those beyond are counted."""
_BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r\v\f"
_NAME_CHARS_MAX = 100
_UTF8_BYTES = 64 << 10


class BatchError(msgspec.Struct, frozen=True):
    """One of `errors.data` of a batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None
    """Of the file, from 1; None: the error is of the whole file."""


class Raw(msgspec.Struct, frozen=True):
    """One line that is not blank, without the space around it."""

    number: int
    """From 1, blank lines counted."""
    offset: int
    """Bytes of the file before `text`."""
    text: bytes | None
    """None: it is longer than may be."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One line that asks for something that may be done."""

    number: int
    offset: int
    size: int
    """With `offset` the bytes of the file that are the whole line."""
    custom_id: str
    model: str
    stream: bool
    """Whether the body asks for a stream: there is none in a batch."""
    body: bytes
    """Of the request, as it stands in the line."""


class Lines:
    """Cuts bytes into lines. `number` and `offset` are those of the first byte fed, so that a
    reader may begin again at any line."""

    def __init__(
        self, line_bytes_max: int = LINE_BYTES_MAX, number: int = 1, offset: int = 0
    ) -> None:
        self._most = line_bytes_max
        self._number = number
        self._start = offset
        self._parts: list[bytes] = []
        self._size = 0
        """Of the line that has begun, dropped parts too."""

    def feed(self, data: bytes) -> Iterator[Raw]:
        """The lines that end in these bytes."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._take(data[start:end])
            yield from self._cut(1)
            start = end + 1
        if start < len(data):
            self._take(data[start:] if start else data)

    def end(self) -> Iterator[Raw]:
        """The last line, where nothing ends it."""
        yield from self._cut(0)

    def _take(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._most:
            self._parts.clear()
        else:
            self._parts.append(part)

    def _cut(self, newline: int) -> Iterator[Raw]:
        number, start, size = self._number, self._start, self._size
        whole = b"".join(self._parts)
        self._number += 1
        self._start += size + newline
        self._parts.clear()
        self._size = 0
        if size > self._most:
            yield Raw(number, start, None)
            return
        text = whole.removeprefix(_BOM).lstrip(_SPACE)
        if text:
            yield Raw(number, start + size - len(text), text.rstrip(_SPACE))


_NULL = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    """Values as they came: what is built of others than strings would have no bound."""

    custom_id: msgspec.Raw = _NULL
    method: msgspec.Raw = _NULL
    url: msgspec.Raw = _NULL
    body: msgspec.Raw = _NULL


class _Body(msgspec.Struct):
    model: msgspec.Raw = _NULL
    stream: msgspec.Raw = _NULL


class _Refused(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(code)
        self.why = code, message, param


_lines = msgspec.json.Decoder(_Line)
_bodies = msgspec.json.Decoder(_Body)
_strings = msgspec.json.Decoder(str)
_MALFORMED = (msgspec.MsgspecError, UnicodeError, RecursionError)


class Validator:
    """Reads one file. All of `feed` and `end` is to be taken; then `errors` tells what is wrong,
    and without any the file may be run."""

    def __init__(
        self,
        endpoint: str,
        *,
        usable: Callable[[str], bool] = lambda model: True,
        one_model: bool = True,
        lines_max: int = LINES_MAX,
        line_bytes_max: int = LINE_BYTES_MAX,
    ) -> None:
        """`endpoint`: the path that all lines must ask for. `usable`: whether its owner may use a
        model of this name. `one_model`: all lines must ask the same, as OpenAI's must."""
        self._endpoint = endpoint
        self._usable = usable
        self._one_model = one_model
        self._lines_max = lines_max
        self._line_bytes_max = line_bytes_max
        self._lines = Lines(line_bytes_max)
        self._seen: set[bytes] = set()
        self._models: set[str] = set()
        self.total = 0
        """Lines that are not blank."""
        self.errors: list[BatchError] = []
        """The first ERRORS_MAX."""
        self.failed = 0
        """Errors in all."""
        self.full = False
        """Whether there were too many lines: no more are read."""

    def feed(self, data: bytes) -> Iterator[Request]:
        """The good requests whose lines end in these bytes."""
        for raw in () if self.full else self._lines.feed(data):
            yield from self._checked(raw)

    def end(self) -> Iterator[Request]:
        """The last one, after all bytes."""
        for raw in () if self.full else self._lines.end():
            yield from self._checked(raw)
        if not self.total:
            self._fail(BatchError("empty_file", "The input file has no requests."))

    def _checked(self, raw: Raw) -> Iterator[Request]:
        if self.full:
            return
        self.total += 1
        if self.total > self._lines_max:
            self.full = True
            text = f"The input file has more than {self._lines_max} requests."
            self._fail(BatchError("too_many_tasks", text))
            return
        try:
            found = self._read(raw)
        except _Refused as e:
            self._fail(BatchError(*e.why, raw.number))
        else:
            yield found

    def _fail(self, error: BatchError) -> None:
        self.failed += 1
        if len(self.errors) < ERRORS_MAX:
            self.errors.append(error)

    def _read(self, raw: Raw) -> Request:
        if raw.text is None:
            text = f"This line is longer than {self._line_bytes_max} bytes."
            raise _Refused("invalid_json_line", text)
        try:
            _check_utf8(raw.text)
            line = _lines.decode(raw.text)
        except _MALFORMED:
            raise _Refused(
                "invalid_json_line", "This line is not parseable as valid JSON."
            ) from None
        id, method, url = _string(line, "custom_id"), _string(line, "method"), _string(line, "url")
        self._check_id(id)
        if method != "POST":
            raise _Refused(
                "invalid_method", f"'method' must be 'POST', not {_cut(method)}.", "method"
            )
        if url != self._endpoint:
            text = f"The URL of this request is not the batch's endpoint, '{self._endpoint}'."
            raise _Refused("url_mismatch", text, "url")
        data = bytes(line.body)
        if data == b"null":
            raise _missing("body")
        try:
            body = _bodies.decode(data)
        except _MALFORMED:
            raise _wrong("body", "an object") from None
        model = _string(body, "model", "body.")
        self._check_model(model)
        return Request(
            number=raw.number,
            offset=raw.offset,
            size=len(raw.text),
            custom_id=id,
            model=model,
            stream=bytes(body.stream) == b"true",
            body=data,
        )

    def _check_id(self, id: str) -> None:
        if len(id) > ID_CHARS_MAX:
            text = f"'custom_id' is longer than {ID_CHARS_MAX} characters."
            raise _Refused("string_above_max_length", text, "custom_id")
        digest = hashlib.blake2b(id.encode(), digest_size=16).digest()
        if digest in self._seen:
            text = "The custom_id of this request is that of another one; each has its own."
            raise _Refused("duplicate_custom_id", text, "custom_id")
        self._seen.add(digest)

    def _check_model(self, model: str) -> None:
        if model in self._models:
            return
        if self._one_model and self._models:
            text = f"The model {_cut(model)} is not that of the requests before."
            raise _Refused("model_mismatch", text, "body.model")
        if not self._usable(model):
            text = f"The model {_cut(model)} does not exist or you may not use it."
            raise _Refused("model_not_found", text, "body.model")
        self._models.add(model)


def _string(struct: msgspec.Struct, name: str, within: str = "") -> str:
    raw = bytes(getattr(struct, name))
    if raw in (b"null", b'""'):
        raise _missing(within + name)
    try:
        return _strings.decode(raw)
    except msgspec.MsgspecError:
        raise _wrong(within + name, "a string") from None


def _missing(name: str) -> _Refused:
    return _Refused("missing_required_parameter", f"Missing required parameter: '{name}'.", name)


def _wrong(name: str, kind: str) -> _Refused:
    return _Refused("invalid_type", f"Invalid type for '{name}': expected {kind}.", name)


def _cut(text: str) -> str:
    return repr(text[:_NAME_CHARS_MAX])


def _check_utf8(text: bytes) -> None:
    """Raises UnicodeDecodeError. In pieces: as text it takes up to four times its bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _UTF8_BYTES):
        decoder.decode(text[start : start + _UTF8_BYTES])
    decoder.decode(b"", True)
