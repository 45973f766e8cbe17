"""The ASGI app: which path does what, and what holds for all of them.

Paths whose requests are queued are found in a table; the few others go through Starlette's
router. Nothing leaves without a status, nothing with a traceback.
"""

import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from common.intake.answers import INTERNAL, NO_ROUTE, Refusal, wrong_method
from common.intake.routes import RESPONSES, ROWS
from gateway.admin import Admin
from gateway.batches_api import BatchesApi
from gateway.client import Client, ClientGone, Receive, Scope, Send
from gateway.files_api import FilesApi
from gateway.front import Front
from gateway.jobs_api import JobsApi
from gateway.listing import Listing
from gateway.metrics import GatewayMetrics
from gateway.pages import Handler, Pages
from gateway.responses_api import ResponsesApi

log = logging.getLogger("fairlane.gateway")

_READS = ("GET", "HEAD")
_CORS_METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
_Route = tuple[str, tuple[str, ...], Handler]
_CORS_EXPOSED = ("X-Fairlane-Job", "X-Fairlane-Queue-Ms", "Retry-After", "Location")


class Endpoint:
    """One handler as an ASGI app: its methods, and the last resort for what it raises."""

    def __init__(self, metrics: GatewayMetrics, methods: Sequence[str], handler: Handler) -> None:
        self._metrics = metrics
        self._methods = tuple(methods)
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(scope, receive, send)
        try:
            if self._methods and client.method not in self._methods:
                raise Refusal(wrong_method(self._methods))
            await self._handler(client)
        except Refusal as refusal:
            self._metrics.refused(refusal.answer.status)
            await client.refuse(refusal.answer)
        except ClientGone:
            return
        except Exception as e:
            _log_fault(e)
            if not client.started:
                self._metrics.refused(INTERNAL.status)
                await client.refuse(INTERNAL)


def _log_fault(e: Exception) -> None:
    """Where it happened, without its text: that may hold a part of a prompt or a key."""
    place = " < ".join(
        f"{f.filename.rpartition('/')[2]}:{f.lineno} {f.name}"
        for f in reversed(traceback.extract_tb(e.__traceback__)[-5:])
    )
    log.error("internal error: %s at %s", type(e).__name__, place)


async def _no_route(client: Client) -> None:
    raise Refusal(NO_ROUTE)


def _stored(front: Front, files: FilesApi, batches: BatchesApi) -> list[_Route]:
    """The routes of files, and of batches, which are of files."""
    return [
        ("/v1/files", (*_READS, "POST"), partial(front.admitted, files.collection)),
        ("/v1/files/{id}", (*_READS, "DELETE"), partial(front.admitted, files.item)),
        ("/v1/files/{id}/content", _READS, partial(front.admitted, files.content)),
        ("/v1/batches", (*_READS, "POST"), partial(front.admitted, batches.collection)),
        ("/v1/batches/{id}", _READS, partial(front.admitted, batches.item)),
        ("/v1/batches/{id}/cancel", ("POST",), partial(front.admitted, batches.cancel)),
    ]


def _durable(front: Front, jobs: JobsApi, responses: ResponsesApi) -> list[_Route]:
    rows: list[_Route] = [
        ("/v1/jobs", (*_READS, "POST"), jobs.collection),
        ("/v1/jobs/{id}", (*_READS, "DELETE"), jobs.item),
        ("/v1/jobs/{id}/cancel", ("POST",), jobs.cancel),
        ("/v1/jobs/{id}/events", ("GET",), jobs.events),
        ("/v1/responses/{id}", (*_READS, "DELETE"), responses.item),
        ("/v1/responses/{id}/cancel", ("POST",), responses.cancel),
    ]
    return [(path, methods, partial(front.admitted, handler)) for path, methods, handler in rows]


class App:
    """The gateway's ASGI app. An answer that it leaves incomplete is to be cut off: uvicorn does
    so when the app returns."""

    def __init__(
        self,
        front: Front,
        pages: Pages,
        listing: Listing,
        files: FilesApi,
        jobs: JobsApi,
        responses: ResponsesApi,
        batches: BatchesApi,
        admin: Admin,
        metrics: GatewayMetrics,
        cors_origins: Sequence[str],
    ) -> None:
        self._front = front
        self._files = files
        self._queued = {
            row.path: Endpoint(metrics, ("POST",), partial(front.serve, row)) for row in ROWS
        }
        row = next(r for r in ROWS if r.path == RESPONSES)
        create = partial(front.admitted, partial(responses.create, row))
        self._queued[RESPONSES] = Endpoint(metrics, ("POST",), create)
        rows: list[_Route] = [
            *_durable(front, jobs, responses),
            *_stored(front, files, batches),
            ("/healthz", _READS, pages.health),
            ("/readyz", _READS, pages.ready),
            ("/metrics", _READS, pages.metrics),
            ("/v1/queue", _READS, listing.page),
            ("/v1/models", _READS, pages.models),
            ("/v1/models/{id:path}", _READS, pages.model),
            ("/admin/backends", (*_READS, "POST"), admin.backends),
            ("/admin/backends/drain", ("POST",), admin.drain),
            ("/admin/backends/undrain", ("POST",), admin.undrain),
            ("/admin/backends/remove", ("POST",), admin.remove),
        ]
        routes = [Route(path, Endpoint(metrics, methods, f)) for path, methods, f in rows]
        self._router = Router(
            routes, redirect_slashes=False, default=Endpoint(metrics, (), _no_route)
        )
        self._entry: Callable[[Scope, Receive, Send], Awaitable[None]] = self._route
        if cors_origins:
            self._entry = CORSMiddleware(
                self._route,
                allow_origins=cors_origins,
                allow_methods=_CORS_METHODS,
                allow_headers=["*"],
                expose_headers=_CORS_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._entry(scope, receive, send)

    async def drain(self, seconds: float, *ends: Callable[[], None]) -> None:
        """Refuse what comes, and wait so long for what is open; then end it as well as can be, also
        by calling `ends`."""

        def end() -> None:
            for one in (self._files.shut_down, *ends):
                one()

        await self._front.drain(seconds, end)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._queued.get(scope["path"])
        await (self._router if endpoint is None else endpoint)(scope, receive, send)
