"""Metrics pages in Prometheus' text format, of which a few series are read.

Most of a page is of no interest: vLLM's has some 50 KB, of which a dozen lines are read. So lines
are found by name first, and only those are parsed. What a page does not say, or says in a way that
cannot be true, is unknown (None), never 0.
"""

import math
import re
from collections.abc import Iterable

from dispatcher.engines.facts import TokenTimes

VALUE_MAX = 2.0**53
"""A larger count is no count."""
KV_SLACK = 0.01
"""A share may exceed 1 by rounding; beyond this it is something else, such as a percentage."""

_QUOTED = rb'"((?:[^"\\]|\\.)*+)"'
_SAMPLE = re.compile(
    rb'(?:\{((?:[^"{}]|"(?:[^"\\]|\\.)*+")*+)\})?'  # labels: braces may stand in quoted values
    rb"[ \t]*([^ \t{}#]++)"  # the value
    rb"(?:[ \t]++-?[0-9.eE+]++)?[ \t]*+(?:#.*)?\r?\Z"  # perhaps a time and an exemplar
)
"""What follows the name in a sample's line. Possessive, so that no line takes long."""
_LABEL = re.compile(rb"([A-Za-z_][A-Za-z0-9_]*+)[ \t]*+=[ \t]*+" + _QUOTED)
_ESCAPED = re.compile(rb"\\(.)")


class Names:
    """The names of series that are read of a kind of engine's page."""

    def __init__(self, names: Iterable[str]) -> None:
        each = "|".join(map(re.escape, sorted(set(names))))
        self.lines = re.compile(rb"\n(%s)([{ \t][^\n]*)(?=\n)" % each.encode())
        """Finds the samples of these names and no longer ones, and nothing else is parsed."""

    def read(self, text: bytes, model: str | None) -> "Page":
        """The page's series of these names.

        Only series whose `model_name` is `model` count, unless there are none of a name: an engine
        may label them with another of its names. As in the format, a last line without its end is
        no line. Never raises.
        """
        samples: dict[str, list[bytes]] = {}
        for name, rest in self.lines.findall(b"\n" + text):
            samples.setdefault(name.decode(), []).append(rest.lstrip())
        wanted = None if model is None else model.encode("utf-8", "surrogatepass")
        return Page(samples, wanted)


class Page:
    """The series that are read of one page.

    Where several names are given they are of different versions, the newest first: the first that
    is usable counts. Series of one name are of several engine processes. One of them that is no
    number, negative or infinite makes the name unusable.
    """

    def __init__(self, samples: dict[str, list[bytes]], wanted: bytes | None) -> None:
        self._samples = samples
        self._wanted = wanted

    def count(self, *names: str, **labels: str) -> int | None:
        """The sum over all series, or those with these labels; None: not there, or unusable."""
        values = self._values(names, labels)
        # Rounded up: an aggregating proxy may show means, and 0.3 waiting is not none.
        return math.ceil(math.fsum(values)) if values else None

    def seconds(self, *names: str) -> float | None:
        """As `count`, not rounded."""
        values = self._values(names, {})
        return math.fsum(values) if values else None

    def share(self, *names: str, **labels: str) -> float | None:
        """The greatest of all series, at most 1; None also where it is a percentage."""
        return as_share(max(self._values(names, labels), default=math.inf))

    def times(self, *histograms: str) -> TokenTimes | None:
        """The sum and the count of the first histogram that has both."""
        for name in histograms:
            seconds, count = self.seconds(f"{name}_sum"), self.count(f"{name}_count")
            if seconds is not None and count is not None:
                return TokenTimes(seconds, count)
        return None

    def _values(self, names: tuple[str, ...], labels: dict[str, str]) -> list[float]:
        each = (self._usable(self._samples.get(name, []), labels) for name in names)
        return next((values for values in each if values), [])

    def _usable(self, samples: list[bytes], labels: dict[str, str]) -> list[float]:
        """The values of the series that count; empty where there are none or one is unusable."""
        every: list[float] = []
        own: list[float] = []
        chosen = {(name.encode(), value.encode()) for name, value in labels.items()}
        for sample in samples:
            found = _SAMPLE.match(sample)
            value = _number(found[2]) if found else math.nan
            carried = _labels(found[1] or b"") if found else {}
            if found and not chosen <= carried.items():
                continue
            every.append(value)
            if self._wanted is not None and carried.get(b"model_name") == self._wanted:
                own.append(value)
        counted = own or every
        return [] if any(math.isnan(v) for v in counted) else counted


def as_share(value: float) -> float | None:
    """A share of 0 to 1; None where it is more by more than rounding."""
    return min(1.0, value) if 0 <= value <= 1.0 + KV_SLACK else None


def histogram(*names: str) -> Iterable[str]:
    """The names of the series that are read of histograms."""
    return (f"{name}_{part}" for name in names for part in ("sum", "count"))


def _number(text: bytes) -> float:
    """The value, or NaN where it is no number from 0 to VALUE_MAX."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    # Python's float also takes underscores, which the format does not have.
    return value if 0 <= value <= VALUE_MAX and b"_" not in text else math.nan


def _labels(text: bytes) -> dict[bytes, bytes]:
    """A label list, escapes undone. Of a label that stands twice the first one counts."""
    labels: dict[bytes, bytes] = {}
    for name, value in _LABEL.findall(text):
        labels.setdefault(name, _ESCAPED.sub(_plain, value) if b"\\" in value else value)
    return labels


def _plain(escaped: re.Match[bytes]) -> bytes:
    return b"\n" if escaped[1] == b"n" else escaped[1]
