"""Which backends are wanted: what the sources list, put together, and what changes by it. Pure."""

from collections.abc import Collection, Iterable, Mapping
from typing import Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from common.settings import BackendSettings

BACKENDS_MAX = 1_024
"""Most backends of one dispatcher, whatever their source."""

_PORTS = {"http": 80, "https": 443}
K = TypeVar("K")


class Listed(msgspec.Struct, frozen=True):
    """One backend as a source lists it."""

    settings: BackendSettings
    source: str
    """`config`, `file` or `admin`."""
    model: str = ""
    """The one that its place in the configuration names."""


class Wanted(msgspec.Struct, frozen=True):
    """One backend that is to be used."""

    settings: BackendSettings
    """Its url is an address, if that of its source is a name to be looked up."""
    source: str
    name: str
    """The address as its source has it."""
    host: str | None = None
    """Name and port to tell the engine, where the url has a looked-up address."""
    models: Mapping[str, BackendSettings] = {}
    """Served by name. The settings may differ by model."""
    discover: bool = False
    """Whether it serves what it lists, besides."""
    drained: bool = False


class Changes(msgspec.Struct, Generic[K], frozen=True):
    """From what is present to what is wanted."""

    start: tuple[K, ...] = ()
    resume: tuple[K, ...] = ()
    """Present and on its way out, and wanted again."""
    leave: tuple[K, ...] = ()


def diff(wanted: Collection[K], present: Mapping[K, bool]) -> Changes[K]:
    """`present`: whether each is on its way out already. In the order in which they come."""
    return Changes(
        tuple(k for k in wanted if k not in present),
        tuple(k for k in wanted if present.get(k, False)),
        tuple(k for k, leaving in present.items() if k not in wanted and not leaving),
    )


def endpoint(url: str) -> tuple[str, int]:
    """Host and port of a backend's url."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS[parts.scheme]


def merge(
    listed: Iterable[Listed],
    addresses: Mapping[tuple[str, int], Collection[str]],
    drained: Collection[str],
) -> dict[str, Wanted]:
    """Wanted backends by their own address, at most BACKENDS_MAX.

    Of the same backend in several places the first counts, and the models of all.
    `addresses`: of the names that were looked up. `drained`: backends, by name or address.
    """
    wanted: dict[str, Wanted] = {}
    for entry in listed:
        for settings, host in _each(entry.settings, addresses):
            address = settings.address
            old = wanted.get(address)
            if old is None and len(wanted) >= BACKENDS_MAX:
                continue
            if old is None:
                name = entry.settings.address
                stopped = address in drained or name in drained
                old = Wanted(settings, entry.source, name, host, drained=stopped)
            names = [entry.model] if entry.model else settings.models
            models = {**dict.fromkeys(names, settings), **old.models}
            discover = old.discover or not names
            wanted[address] = msgspec.structs.replace(old, models=models, discover=discover)
    return wanted


def _each(
    settings: BackendSettings, addresses: Mapping[tuple[str, int], Collection[str]]
) -> Iterable[tuple[BackendSettings, str | None]]:
    if not settings.resolve:
        yield settings, None
        return
    host, port = endpoint(settings.url)
    parts = urlsplit(settings.url)
    for address in addresses.get((host, port), ()):
        shown = f"[{address}]" if ":" in address else address
        url = f"{parts.scheme}://{shown}:{port}"
        yield msgspec.structs.replace(settings, url=url, resolve=False), parts.netloc
