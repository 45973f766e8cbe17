"""The form that uploads a file: multipart/form-data, read as it comes. Pure.

The file's bytes go through; what is kept are the few short fields beside it, in whichever order
they come.
"""

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from common.intake.answers import Refusal, bad_request, too_large

PURPOSES = ("fine-tune", "assistants", "batch", "user_data", "vision", "evals")
"""What files may be uploaded for, as OpenAI's API has it."""
LISTED = (*PURPOSES, "assistants_output", "batch_output", "fine-tune-results")
"""What files may be listed by: some purposes are of results alone."""
EXPIRES_S_MIN, EXPIRES_S_MAX = 3_600, 2_592_000
PARTS_MAX = 16
FIELD_BYTES_MAX = 1_024
HEADER_BYTES_MAX = 16_384
"""Of one header of a part: a file's name is in it."""
HEADERS_MAX = 8
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_FILE = "file"


class Form:
    """One form. After its last byte `finish` says what is asked for."""

    def __init__(self, content_type: bytes | None, file_bytes_max: int) -> None:
        """Raises Refusal where the content type is of no such form."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary", b"")
        if kind != b"multipart/form-data" or not boundary:
            raise bad_request("The body must be multipart/form-data with a boundary.")
        self._most = file_bytes_max
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_part_end": self._part_end,
                    "on_end": self._end,
                },
                max_header_count=HEADERS_MAX,
                max_header_size=HEADER_BYTES_MAX,
            )
        except FormParserError:
            raise bad_request("The boundary of the form is too long.") from None
        self._parts = 0
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._name: str | None = None
        self._value = bytearray()
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._out: list[bytes] = []
        self._size = 0
        self._over = False

    def feed(self, data: bytes) -> list[bytes]:
        """The file's bytes in this piece of the body. Raises Refusal."""
        try:
            self._parser.write(data)
        except FormParserError:
            raise bad_request("The body is no valid multipart/form-data.") from None
        out, self._out = self._out, []
        return out

    def finish(self) -> "Asked":
        """After the body's end. Raises Refusal where it was cut off, or lacks what it must have."""
        if not self._over:
            raise bad_request("The body ends within the form.")
        if self._filename is None:
            raise bad_request("'file' is a required property", _FILE)
        if "purpose" not in self._fields:
            raise bad_request("'purpose' is a required property", "purpose")
        return Asked(self._filename, self._fields["purpose"], self._expires())

    def _expires(self) -> int | None:
        anchor = self._fields.get("expires_after[anchor]")
        seconds = self._fields.get("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise bad_request("`expires_after[anchor]` must be 'created_at'.", "expires_after")
        if not seconds or not (seconds.isascii() and seconds.isdigit()):
            raise bad_request("`expires_after[seconds]` must be a whole number.", "expires_after")
        if not EXPIRES_S_MIN <= int(seconds) <= EXPIRES_S_MAX:
            text = f"must be from {EXPIRES_S_MIN} to {EXPIRES_S_MAX}"
            raise bad_request(f"`expires_after[seconds]` {text}.", "expires_after")
        return int(seconds)

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise bad_request(f"The form has more than {PARTS_MAX} parts.")
        self._name, self._value = None, bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_end(self) -> None:
        name, value = (bytes(b) for b in self._header)
        self._header = (bytearray(), bytearray())
        if name.strip().lower() != b"content-disposition":
            return
        kind, options = parse_options_header(value)
        if kind != b"form-data":
            return
        self._name = options.get(b"name", b"").decode(errors="replace")
        if self._name == _FILE:
            if self._filename is not None:
                raise bad_request("The form has more than one `file`.", _FILE)
            self._filename = options.get(b"filename", b"file").decode(errors="replace")

    def _headers_finished(self) -> None:
        if self._name is None:
            raise bad_request("A part of the form has no name.")
        if self._name in self._fields:
            raise bad_request(f"The form has `{self._name}` twice.", self._name)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == _FILE:
            self._size += end - start
            if self._size > self._most:
                raise Refusal(msgspec.structs.replace(too_large(self._most), param=_FILE))
            self._out.append(data[start:end])
        elif len(self._value) + end - start > FIELD_BYTES_MAX:
            raise bad_request(f"A field of the form is longer than {FIELD_BYTES_MAX} bytes.")
        else:
            self._value += data[start:end]

    def _part_end(self) -> None:
        if self._name not in _FIELDS:
            return
        value = self._value.decode(errors="replace")
        if self._name == "purpose":
            check_purpose(value, PURPOSES)
        self._fields[self._name] = value

    def _end(self) -> None:
        self._over = True


class Asked(msgspec.Struct, frozen=True):
    """What a form asks for."""

    filename: str
    purpose: str
    expires_after_s: int | None


def check_purpose(value: str, known: tuple[str, ...]) -> None:
    """Raises Refusal, in OpenAI's words, for a purpose that is none of these."""
    if value not in known:
        shown = ", ".join(f"'{p}'" for p in known)
        raise bad_request(f"{value[:100]!r} is not one of [{shown}] - 'purpose'", "purpose")
