"""How log lines look: one line each, time, level, part and text, on standard error."""

import logging
import sys


class _Line(logging.Formatter):
    """What others chose, such as the name of a model, can neither begin a line of its own nor
    command a terminal. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        return text if text.isprintable() else "".join(map(_shown, text))


def _shown(char: str) -> str:
    return char if char.isprintable() else repr(char)[1:-1]


def setup(level: str = "INFO") -> None:
    """Send Fairlane's log lines to standard error. Raises ValueError for an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Line("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fairlane").setLevel(level)
    # To them each malformed form or request is a warning; its sender is told, and nobody else need
    # be: anyone could fill the log.
    for name in ("python_multipart", "uvicorn"):
        logging.getLogger(name).setLevel(logging.ERROR)
