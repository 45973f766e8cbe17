"""A simulated engine server without its sockets: routes, the engine's clock, faults.

`sim.server` puts it behind HTTP, `sim.transport` behind httpx. It lives in one event loop and
follows that loop's clock, so it works in virtual time too. One timer, set to the engine's next
event, drives everything: all events of a step are written in one go, without a task switch.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from sim import metrics, replies
from sim.engine import Engine
from sim.events import Gauges, TokenEvent
from sim.exchange import JSON_HEADERS, Exchange, Headers, Sink, answer
from sim.fields import ApiError
from sim.openai import Kind, parse
from sim.pacer import Pacer
from sim.refusals import refusal
from sim.settings import EngineSettings

EPOCH_S = 1_795_977_357
"""Unix time of the loop's zero: ids and `created` do not depend on the wall clock."""
HELD_MAX = 10_000
_ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."

_CALLS: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "responses",
}
_PAGES = ("/v1/models", "/health", "/ping", "/version", "/metrics")


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A request as it came, `at` in the loop's seconds. Header names are lower case."""

    at: float
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """A request and its answer in progress; `abort` is what a client's disconnect does."""

    def __init__(self, host: Host, received: Received, sink: Sink) -> None:
        self.received = received
        self.sink = sink
        self.exchange: Exchange | None = None
        self.request_ids: list[int] = []
        self.keep_alive: asyncio.TimerHandle | None = None
        self._host = host

    def abort(self) -> None:
        """Give up the answer and free what it holds in the engine; harmless when it is over."""
        self._host.drop(self)


class Host:
    """One simulated engine and its open connections.

    `log` keeps the last `log_size` requests. `observer` is called with the gauges after each
    change of the engine's state. The fault methods are for tests.
    """

    def __init__(self, settings: EngineSettings, *, log_size: int = 1_000) -> None:
        self.settings = settings
        self.engine = Engine(settings, self._observe)
        self.log: deque[Received] = deque(maxlen=log_size)
        self.observer: Callable[[Gauges], None] | None = None
        self.peak_waiting = 0
        self.killed = False
        self._refuse: ApiError | None = None
        self._crashed = False
        self._gauges = metrics.GaugeHistory(settings.metrics_delay)
        self._pacer = Pacer(self._tick)
        self._started = 0.0
        self._answers = 0
        self._open: set[Connection] = set()
        self._held: deque[Connection] = deque()
        self._owners: dict[int, tuple[Connection, int]] = {}

    # --- requests ---

    def open(self, received: Received, sink: Sink) -> Connection:
        """Take a request; its answer goes to the sink, at once or as the engine produces it."""
        if self._pacer.attach():
            self._started = EPOCH_S + self._pacer.now()
        self.log.append(received)
        connection = Connection(self, received, sink)
        self._open.add(connection)
        if self.killed:
            self._break(connection)
        elif not self._pacer.frozen:
            self._answer(connection)
        elif len(self._held) < HELD_MAX:
            self._held.append(connection)
        else:
            self._break(connection)
        return connection

    def drop(self, connection: Connection) -> None:
        """Forget a connection and abort what it runs."""
        if connection not in self._open:
            return
        self._open.discard(connection)
        if connection.keep_alive is not None:
            connection.keep_alive.cancel()
        now = self._pacer.now()
        for request_id in connection.request_ids:
            if self._owners.pop(request_id, None) is not None:
                self.engine.abort(now, request_id)
        self._arm()

    def close(self) -> None:
        """Break all open connections and stop the clock."""
        for connection in tuple(self._open):
            self._break(connection)
        self._pacer.arm(None)

    # --- faults ---

    def kill(self) -> None:
        """The server is gone: connections break, its queue and its counters are lost."""
        self.close()
        self.killed = True
        self._held.clear()
        self.engine = Engine(self.settings, self._observe)
        self._gauges = metrics.GaugeHistory(self.settings.metrics_delay)

    def crash(self) -> None:
        """The engine's process dies under a living server: streams end with an error event."""
        error = ApiError(500, _ENGINE_DEAD, "InternalServerError")
        for connection in tuple(self._open):
            if connection.exchange is not None:
                self.drop(connection)
                connection.exchange.fail(error)
        self._crashed = True
        self._refuse = error

    def refuse(self, status: int, message: str | None = None) -> None:
        """Answer new calls with this status; those under way go on. 503: overload, 500: drain."""
        if status == 503 and message is None:
            self._refuse = refusal(self.settings.engine, stream=False)
            return
        text = message or "cannot schedule new futures after shutdown"
        self._refuse = ApiError(status, text, "InternalServerError")

    def freeze(self) -> None:
        """Nothing moves: no bytes on open streams, no answer to new requests of any kind."""
        self._pacer.freeze()

    def revive(self) -> None:
        """End all faults. After a freeze, engine time goes on where it stopped."""
        self.killed = self._crashed = False
        self._refuse = None
        self._pacer.thaw()
        while self._held:
            connection = self._held.popleft()
            if connection in self._open:
                self._answer(connection)
        self._arm()

    # --- routes ---

    def _answer(self, connection: Connection) -> None:
        """Route a request; what the engine must compute stays open, the rest is answered."""
        received = connection.received
        kind = _CALLS.get(received.path)
        wanted = "POST" if kind else "GET"
        missing = kind is None and received.path not in _PAGES
        if missing or (kind == "embeddings" and not self.settings.embeddings):
            self._reply(connection, 404, b'{"detail":"Not Found"}')
        elif received.method != wanted:
            body = b'{"detail":"Method Not Allowed"}'
            self._reply(connection, 405, body, [("allow", wanted), *JSON_HEADERS])
        elif kind is None:
            self._reply(connection, *self._page(received.path))
        else:
            try:
                self._call(connection, kind)
            except ApiError as error:
                own = [("content-type", error.content_type), ("vary", "Origin")]
                headers = [*own, *self._request_id_header(received)]
                self._reply(connection, error.status, error.body, headers)

    def _reply(
        self, connection: Connection, status: int, body: bytes, headers: Headers = JSON_HEADERS
    ) -> None:
        self._open.discard(connection)
        answer(connection.sink, status, body, headers)

    def _page(self, path: str) -> tuple[int, bytes, Headers]:
        if path == "/metrics":
            shown = self._gauges.shown(self._pacer.now())
            body = metrics.render(self.settings, self.engine.stats, shown, self._started)
            kind = metrics.CONTENT_TYPES[self.settings.engine]
            return 200, body, [("content-type", kind), ("vary", "Origin")]
        if path == "/v1/models":
            return 200, replies.models_body(self.settings, int(self._started)), JSON_HEADERS
        if path == "/version":
            return 200, replies.VERSION, JSON_HEADERS
        return 503 if self._crashed else 200, b"", [("vary", "Origin")]

    def _call(self, connection: Connection, kind: Kind) -> None:
        """Submit a call's sequences. Raises ApiError for one that is refused."""
        received = connection.received
        if not received.headers.get("content-type", "").lower().startswith("application/json"):
            text = (
                "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            )
            raise ApiError(400, text, "Bad Request")
        call = parse(kind, received.body, self.settings, received.headers.get("x-vllm-priority"))
        if self._refuse is not None:
            raise self._refuse
        limit = self.settings.max_num_queued_reqs
        if limit is not None and self.engine.waiting() >= limit:
            self.engine.stats.rejected += 1
            raise refusal(self.settings.engine, stream=call.stream)
        now = self._pacer.now()
        extra = self._request_id_header(received)
        answer_id = received.headers.get("x-request-id") or self._new_id()[:16]
        exchange = Exchange(
            call, connection.sink, answer_id, int(EPOCH_S + now), self.settings.seed, extra
        )
        connection.exchange = exchange
        exchange.open()
        for choice in call.choices:
            request_id = self.engine.submit(now, choice.sequence)
            connection.request_ids.append(request_id)
            self._owners[request_id] = (connection, choice.index)
        if call.stream and self.settings.sse_keep_alive_s:
            self._keep_alive(connection)
        self._arm()

    def _request_id_header(self, received: Received) -> Headers:
        if not self.settings.request_id_headers:
            return []
        return [("x-request-id", received.headers.get("x-request-id") or self._new_id())]

    def _new_id(self) -> str:
        """32 hex digits, the same in each run."""
        self._answers += 1
        text = f"{self.settings.seed}:{self.settings.instance}:{self._answers}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _keep_alive(self, connection: Connection) -> None:
        """Comment now and then until the stream's first event."""

        def comment() -> None:
            exchange = connection.exchange
            if connection in self._open and exchange is not None and not exchange.started:
                exchange.comment(replies.KEEP_ALIVE)
                self._keep_alive(connection)

        pause = self.settings.sse_keep_alive_s
        connection.keep_alive = self._pacer.later(pause, comment)

    def _break(self, connection: Connection) -> None:
        self.drop(connection)
        connection.sink.broken()

    # --- the engine ---

    def _observe(self, gauges: Gauges) -> None:
        self._gauges.add(gauges)
        self.peak_waiting = max(self.peak_waiting, gauges.waiting)
        if self.observer is not None:
            self.observer(gauges)

    def _arm(self) -> None:
        self._pacer.arm(None if self.killed else self.engine.next_event(self._pacer.now()))

    def _tick(self, now: float) -> None:
        for event in self.engine.advance(now):
            owner = self._owners.get(event.request_id)
            if owner is None:
                continue
            connection, index = owner
            exchange = connection.exchange
            assert exchange is not None
            if isinstance(event, TokenEvent):
                exchange.token(index, event.index)
                continue
            del self._owners[event.request_id]
            if exchange.finished(index, event.tokens, event.reason):
                self._open.discard(connection)
        self._arm()
