"""How log lines look: one line each, time, level, part and text, on standard error."""

import logging
import sys


def setup(level: str = "INFO") -> None:
    """Send Fairlane's log lines to standard error. Raises ValueError for an unknown level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("fairlane").setLevel(level)
    # To it each malformed form is a warning; its sender is told, and nobody else need be.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
