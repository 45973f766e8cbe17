"""The one place that reads a clock."""

import time


def monotonic() -> float:
    """Seconds on this process's monotonic clock, for its own time-outs; never sent anywhere."""
    return time.monotonic()


def wall() -> float:
    """Seconds since the epoch, for people: log lines and `created` fields. No rule of the
    queue reads it; lifetimes of files, which are of hours and days, do."""
    return time.time()
