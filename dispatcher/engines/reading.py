"""Where a backend's metrics page is and whose it is: as configured, or found out.

`auto` asks the paths of all kinds in turn until a page is recognised, and then that kind's own,
the best first. A page that stops making sense is looked at anew: another engine may have taken the
address over. Until something is recognised nothing is known of the load.
"""

from dispatcher.engines.facts import NOTHING, EngineFacts
from dispatcher.engines.kinds import ADAPTERS, AUTO, NONE, recognise

LOST = 3
"""So many readings in a row that told nothing: it is looked for anew, on every path."""
PATHS = tuple(dict.fromkeys(path for adapter in ADAPTERS.values() for path in adapter.paths))
"""Of all kinds."""


class Reading:
    """Of one backend. `engine` is `BackendSettings.engine`: one of ADAPTERS, `none` or `auto`."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._looks = engine == AUTO
        self.kind: str | None = None if self._looks else engine
        """The kind of engine; `none`: one without metrics that can be read, by configuration or
        by its page; None: no page was seen yet."""
        own = ADAPTERS[engine].paths if engine in ADAPTERS else ()
        self._paths = PATHS if self._looks else own
        self._at = 0
        self._settled = False
        self._misses = 0

    @property
    def path(self) -> str | None:
        """Where the page is asked for next; None: it is not."""
        return self._paths[self._at] if self._paths else None

    def read(self, page: bytes, model: str | None) -> EngineFacts:
        """The facts of the page at `path`; NOTHING where it is no known engine's."""
        facts = self._facts(page, model)
        if facts == NOTHING and self._looks:
            kind = recognise(page)
            if kind is not None and kind != self.kind:
                return self._recognised(kind, page, model)
            if kind is None and (self.kind is None or self._misses + 1 >= LOST):
                self.kind = NONE
        if facts == NOTHING:
            self.missed()
        else:
            self._settled, self._misses = True, 0
        return facts

    def missed(self) -> None:
        """There was no page, or none that tells anything."""
        self._misses += 1
        if not self._settled and self._paths:
            self._at = (self._at + 1) % len(self._paths)
        elif self._misses >= LOST:
            self._look(PATHS if self._looks else self._paths)

    def _recognised(self, kind: str, page: bytes, model: str | None) -> EngineFacts:
        path = self.path
        self.kind = kind
        self._look(ADAPTERS[kind].paths)
        facts = self._facts(page, model)
        self._settled = facts != NOTHING and path == self.path
        return facts

    def _facts(self, page: bytes, model: str | None) -> EngineFacts:
        adapter = ADAPTERS.get(self.kind or NONE)
        return NOTHING if adapter is None else adapter.read(page, model)

    def _look(self, paths: tuple[str, ...]) -> None:
        self._paths, self._at, self._settled, self._misses = paths, 0, False, 0
