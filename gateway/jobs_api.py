"""`/v1/jobs`: requests put on the queue, to be come back to."""

import asyncio

import msgspec

from common import joblog
from common.durable import LISTED, About, Result, ResultTooLargeError, Status
from common.intake import body as bodies
from common.intake.answers import Refusal, bad_request
from common.settings import GatewaySettings
from gateway import jobs
from gateway.client import Client
from gateway.durables import NOWHERE, Durables, Wanted, idempotency_key, outages
from gateway.events import Cutter, Event, Place, parse
from gateway.following import Follow
from gateway.intake import Intake
from gateway.pages import json_page, listed
from gateway.query import header, limit, order, query
from gateway.webhooks import Webhooks

LIMIT_MAX, LIMIT = 100, 20
"""Most jobs of a page, and how many it has where the request does not say."""
_LAST_CHARS_MAX = 64


class JobsApi:
    """Its handlers. They raise Refusal and ClientGone."""

    def __init__(
        self, settings: GatewaySettings, intake: Intake, durables: Durables, follow: Follow,
        webhooks: Webhooks,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._intake = intake
        self._durables = durables
        self._follow = follow
        self._webhooks = webhooks

    async def collection(self, client: Client) -> None:
        """`/v1/jobs`: list or submit."""
        self._intake.keys.principal(client.authorization)
        if client.method == "POST":
            await self._submit(client)
        else:
            await self._list(client)

    async def item(self, client: Client) -> None:
        """`/v1/jobs/{id}`: look, or cancel, or delete what has ended."""
        about = await self._found(client)
        with outages():
            if client.method != "DELETE":
                status = await self._durables.jobs.status(about)
                await json_page(client, await self._shown(status))
                return
            status = await self._durables.jobs.status(about)
            if not status.over:
                stopped = await self._durables.stop(about)
                await json_page(client, await self._shown(stopped))
                return
            await self._durables.jobs.drop(about)
        await json_page(client, {"id": about.id, "object": "job", "deleted": True})

    async def cancel(self, client: Client) -> None:
        """`POST /v1/jobs/{id}/cancel`; of one that has ended, what it is, with its answer."""
        about = await self._found(client)
        with outages():
            status = await self._durables.jobs.status(about)
            if not status.over:
                status = await self._durables.stop(about)
            await json_page(client, await self._shown(status))

    async def events(self, client: Client) -> None:
        """`/v1/jobs/{id}/events`: the answer, from the beginning or behind an event."""
        about = await self._found(client)
        place = _place(client)
        with outages():
            status = await self._durables.jobs.status(about)
            k = self._durables.queues.of(about.model).keys
            last = await joblog.last(self._durables.broker, k, about.id) if place else None
        if status.state == "unknown":
            raise Refusal(jobs.GONE)
        # While it runs, a Redis that lost the log's end is given it again.
        if place is not None and status.over and (last is None or place.beyond(last)):
            raise bad_request("`Last-Event-ID` is of no event of this job.", "Last-Event-ID")
        if place is not None and place.events is None and status.over:
            await client.respond(204, [(b"x-fairlane-job", about.id.encode())], b"")
            return
        await self._follow.serve(client, about, Events(about, place))

    async def _submit(self, client: Client) -> None:
        body = await client.read_body(self._settings.body_max_bytes)
        asked = jobs.read(body, self._settings.job_ttl_s, private=self._settings.webhook_private)
        del body
        fields = bodies.read(asked.body)
        if asked.user is not None:
            fields = msgspec.structs.replace(fields, user=asked.user)
        accepted = self._intake.accept(asked.row, client, fields, cls=asked.cls)
        if asked.webhook:
            self._webhooks.check(accepted.who.user)
        key = idempotency_key(header(client, b"idempotency-key"), asked.key)
        wanted = Wanted(
            kind="job", ttl_s=asked.ttl_s, metadata=asked.metadata, webhook=asked.webhook,
            digest=asked.digest(), key=key,
        )  # fmt: skip
        about = await self._durables.submit(accepted, asked.body, wanted)
        with outages():
            shown = await self._shown(await self._durables.jobs.status(about))
        place = (b"location", b"/v1/jobs/" + about.id.encode())
        await json_page(client, shown, 202, [place, (b"x-fairlane-job", about.id.encode())])

    async def _list(self, client: Client) -> None:
        asked = query(client)
        owner = self._intake.owner(client, asked.get("user"))
        most, by = limit(asked, LIMIT_MAX, LIMIT), order(asked)
        with outages():
            found, more = await self._durables.jobs.own(
                owner, after=asked.get("after", ""), limit=most, order=by
            )
            stand = await asyncio.gather(*map(self._durables.jobs.status, found))
        places = await self._durables.standings([s.about for s in stand if s.state == "queued"])
        data = [jobs.shown(s, places.get(s.about.id, NOWHERE)) for s in stand]
        await json_page(client, listed(data, more))

    async def _found(self, client: Client) -> About:
        owner = self._intake.owner(client, query(client).get("user"))
        id: str = client.scope["path_params"]["id"]
        return await self._durables.find(owner, id, jobs.NO_JOB, *LISTED)

    async def _shown(self, status: Status) -> dict[str, object]:
        """With its place while it waits, and its result once it has ended. Raises BrokerError."""
        if status.state == "queued":
            places = await self._durables.standings([status.about])
            return jobs.shown(status, places.get(status.about.id, NOWHERE))
        return jobs.shown(status, result=await self.result(status))

    async def result(self, status: Status) -> Result | None:
        """The answer of a job that has ended; of a stream, and of one that broke off, its status
        alone. Raises BrokerError."""
        if not status.over:
            return None
        body = status.answered and not (status.about.stream and status.state == "completed")
        try:
            return await self._durables.jobs.result(status.about, body=body)
        except ResultTooLargeError:
            return None


class Events:
    """A job's events as `/v1/jobs/{id}/events` tells them."""

    def __init__(self, about: About, place: Place | None) -> None:
        self.cutter = Cutter(place)
        self._about = about

    def begun(self) -> bytes:
        """Nothing."""
        return b""

    def event(self, event: Event) -> bytes:
        """As it is, with its id."""
        return event.encoded()

    def over(self, status: Status) -> bytes:
        """A body that is no stream as `result`; then `end`, or `error`."""
        cutter, end = self.cutter, self.cutter.end
        state, outcome, message = status.state, status.outcome, status.message
        usage = status.usage
        if end is not None:
            outcome, message, usage = end.outcome, end.message, end.usage
        body, told = cutter.body, b""
        good = end is not None and state == "completed"
        if good and not cutter.stream and not cutter.has_result():
            told = Event(cutter.next_id(), _event(b"result", body)).encoded()
        own = None if cutter.stream or good else jobs.engine_error(body)
        what: dict[str, object] = {"id": self._about.id, "state": state}
        if good:
            what["usage"] = jobs.usage(usage)
        else:
            what["error"] = own or jobs.error_of(outcome, message)
        data = _event(b"end" if good else b"error", msgspec.json.encode(what))
        return told + Event(cutter.last_id(), data).encoded()

    def interrupted(self) -> bytes:
        """`interrupted`, without an id: the next request goes on where this one was."""
        text = "The stream was interrupted: ask again with the last event's id."
        what = {"id": self._about.id, "message": text}
        return _event(b"interrupted", msgspec.json.encode(what))


def _event(name: bytes, data: bytes) -> bytes:
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    return b"event: " + name + b"\ndata: " + lines + b"\n\n"


def _place(client: Client) -> Place | None:
    """Behind which event to go on. Raises Refusal (400)."""
    raw = header(client, b"last-event-id")
    text = query(client).get("last_event_id", "") if raw is None else raw.decode("latin-1").strip()
    if not text:
        return None
    place = parse(text) if len(text) <= _LAST_CHARS_MAX else None
    if place is None:
        raise bad_request("`Last-Event-ID` is no event's of a job.", "Last-Event-ID")
    return place
