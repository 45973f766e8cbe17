"""Metrics pages in Prometheus' text format, of which a few series are read.

Most of a page is of no interest: vLLM's has some 50 KB, of which a dozen lines are read. So lines
are found by name first, and only those are parsed. What a page does not say, or says in a way that
cannot be true, is unknown (None), never 0.
"""

import math
import re
from collections.abc import ItemsView, Iterable, Mapping, Sequence

import msgspec

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

    def shown(self, text: bytes) -> bool:
        """Whether the page has a sample of any of them."""
        return self.lines.search(b"\n" + text) is not None

    def read(self, text: bytes, model: str | None) -> "Page":
        """The page's series of these names.

        Only series whose `model_name` is `model` count, unless there are none of a name: an engine
        may label them with another of its names. As in the format, a last line without its end is
        no line. Never raises.
        """
        samples: dict[str, list[bytes]] = {}
        for name, rest in self.lines.findall(b"\n" + text):
            samples.setdefault(name.decode(), []).append(rest.lstrip())
        return Page(samples, model)


class Series(msgspec.Struct, frozen=True):
    """One sample: its labels, and its value, -1 where that is no number of 0 to VALUE_MAX."""

    labels: Mapping[str, str]
    value: float


UNREADABLE = Series({}, -1.0)
"""Of a line that is no sample: it makes its name unusable."""


class Page:
    """The series that are read of one page.

    Where several names are given they are of different versions, the newest first: the first that
    is usable counts. Series of one name are of several engine processes. One of them that is no
    number, negative or infinite makes the name unusable.
    """

    def __init__(self, samples: Mapping[str, list[bytes]], model: str | None) -> None:
        self._samples = samples
        self._model = model

    def series(self, *names: str, **labels: str) -> list[Series]:
        """Those that count, of them those with these labels; empty where one is unusable."""
        every = (self._counted(name, labels.items()) for name in names)
        return next((s for s in every if s and min(x.value for x in s) >= 0), [])

    def count(self, *names: str, **labels: str) -> int | None:
        """The sum over all series; None: not there, or unusable."""
        return as_count([s.value for s in self.series(*names, **labels)])

    def total(self, *names: str) -> float | None:
        """As `count`, not rounded."""
        values = [s.value for s in self.series(*names)]
        return math.fsum(values) if values else None

    def share(self, *names: str, **labels: str) -> float | None:
        """The greatest of all series, at most 1; None also where it is a percentage."""
        return as_share(max((s.value for s in self.series(*names, **labels)), default=math.inf))

    def times(self, *histograms: str) -> TokenTimes | None:
        """The sum and the count of the first histogram that has both."""
        for name in histograms:
            seconds, count = self.total(f"{name}_sum"), self.count(f"{name}_count")
            if seconds is not None and count is not None:
                return TokenTimes(seconds, count)
        return None

    def _counted(self, name: str, labels: ItemsView[str, str]) -> list[Series]:
        every = [_series(sample) for sample in self._samples.get(name, [])]
        chosen = [s for s in every if labels <= s.labels.items() or s == UNREADABLE]
        own = [s for s in chosen if s.labels.get("model_name") == self._model]
        return own if own and self._model is not None else chosen


def as_count(values: Sequence[float]) -> int | None:
    """Their sum; None where there are none."""
    # Rounded up: an aggregating proxy may show means, and 0.3 waiting is not none.
    return math.ceil(math.fsum(values)) if values else None


def as_share(value: float) -> float | None:
    """A share of 0 to 1; None where it is more by more than rounding."""
    return min(1.0, value) if 0 <= value <= 1.0 + KV_SLACK else None


def histogram(*names: str) -> Iterable[str]:
    """The names of the series that are read of histograms."""
    return (f"{name}_{part}" for name in names for part in ("sum", "count"))


def _number(text: bytes) -> float:
    try:
        value = float(text)
    except ValueError:
        return -1.0
    # Python's float also takes underscores, which the format does not have.
    return value if 0 <= value <= VALUE_MAX and b"_" not in text else -1.0


def _series(sample: bytes) -> Series:
    found = _SAMPLE.match(sample)
    return Series(_labels(found[1] or b""), _number(found[2])) if found else UNREADABLE


def _labels(text: bytes) -> dict[str, str]:
    """A label list, escapes undone. Of a label that stands twice the first one counts."""
    labels: dict[str, str] = {}
    for name, value in _LABEL.findall(text):
        plain = _ESCAPED.sub(_plain, value) if b"\\" in value else value
        labels.setdefault(name.decode(), plain.decode("utf-8", "surrogateescape"))
    return labels


def _plain(escaped: re.Match[bytes]) -> bytes:
    return b"\n" if escaped[1] == b"n" else escaped[1]
