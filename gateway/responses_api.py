"""`/v1/responses`: passed through like a chat, or made in the background."""

import msgspec

from common.durable import About, ResultTooLargeError, Status
from common.intake import body as bodies
from common.intake.answers import Refusal, bad_request
from common.intake.routes import Row
from common.settings import GatewaySettings
from gateway import responses
from gateway.client import Client
from gateway.durables import Durables, Wanted, idempotency_key, outages
from gateway.following import Follow
from gateway.front import Front
from gateway.intake import Accepted, Intake
from gateway.pages import json_page
from gateway.query import header, query

_AFTER_DIGITS_MAX = 9


class ResponsesApi:
    """Its handlers. They raise Refusal and ClientGone."""

    def __init__(
        self, settings: GatewaySettings, front: Front, intake: Intake, durables: Durables,
        follow: Follow,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._front = front
        self._intake = intake
        self._durables = durables
        self._follow = follow

    async def create(self, row: Row, client: Client) -> None:
        """`POST /v1/responses`."""
        self._intake.keys.principal(client.authorization)
        body = await client.read_body(self._settings.body_max_bytes)
        fields = bodies.read(body)
        accepted = self._intake.accept(row, client, fields)
        if responses.background(fields.top):
            del body, fields
            await self._background(client, accepted)
            return
        exchange = await self._front.exchange(client, accepted, body)
        del body, fields, accepted
        await exchange.run()

    async def item(self, client: Client) -> None:
        """`/v1/responses/{id}`: look, follow, or delete."""
        about = await self._found(client)
        if client.method == "DELETE":
            with outages():
                await self._durables.stop(about)
                await self._durables.jobs.drop(about)
            id = responses.PREFIX + about.id
            await json_page(client, {"id": id, "object": "response", "deleted": True})
            return
        asked = query(client)
        if asked.get("stream") in (None, "false"):
            with outages():
                shown = await self._shown(await self._durables.jobs.status(about))
            await json_page(client, shown)
            return
        if not about.stream:
            text = "A response can be streamed where it was created with `stream: true`."
            raise bad_request(text, "stream")
        after = asked.get("starting_after", "")
        if after and not (after.isascii() and after.isdigit() and len(after) <= _AFTER_DIGITS_MAX):
            raise bad_request("`starting_after` must be a sequence number.", "starting_after")
        with outages():
            _kept(await self._durables.jobs.status(about))
        await self._follow.serve(client, about, responses.Retold(about, int(after or -1)))

    async def cancel(self, client: Client) -> None:
        """`POST /v1/responses/{id}/cancel`; of one that has ended, what it is."""
        about = await self._found(client)
        with outages():
            shown = await self._shown(await self._durables.stop(about))
        await json_page(client, shown)

    async def _background(self, client: Client, a: Accepted) -> None:
        top = {n: raw for n, raw in a.fields.top.items() if n != "background"}
        a = msgspec.structs.replace(a, fields=msgspec.structs.replace(a.fields, top=top))
        wanted = Wanted(
            kind="response", ttl_s=self._settings.job_ttl_s, digest=responses.digest(top),
            key=idempotency_key(header(client, b"idempotency-key")), extra=responses.echo(top),
        )  # fmt: skip
        about = await self._durables.submit(a, msgspec.json.encode(top), wanted)
        if about.stream:
            await self._follow.serve(client, about, responses.Retold(about))
            return
        with outages():
            shown = await self._shown(await self._durables.jobs.status(about))
        await json_page(client, shown, more=[(b"x-fairlane-job", about.id.encode())])

    async def _found(self, client: Client) -> About:
        owner = self._intake.owner(client, query(client).get("user"))
        id: str = client.scope["path_params"]["id"]
        job = responses.job_of(id)
        return await self._durables.find(owner, job, responses.missing(id), "response")

    async def _shown(self, status: Status) -> dict[str, object]:
        """Raises BrokerError, and Refusal where it is not kept any more."""
        _kept(status)
        if not status.answered:
            return responses.shown(status, None)
        try:
            return responses.shown(status, await self._durables.jobs.result(status.about))
        except ResultTooLargeError:
            return responses.shown(status, None)


def _kept(status: Status) -> None:
    if status.state == "unknown":
        raise Refusal(responses.missing(responses.PREFIX + status.about.id))
