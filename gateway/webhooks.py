"""Telling users of the ends of their jobs: webhooks, sent by any number of gateways.

Who owns a webhook: the queue, until the job has ended and its id stands in the model's list of
those with a webhook; that list, until some gateway has put the id into `fl:webhooks`, which says
when it is due; that set, until the webhook was taken or is given up. A gateway sends only while it
holds the job's lock, which expires: so one that is killed loses none, and what it may have sent is
sent again, with the same `webhook-id`.
"""

import asyncio
import datetime
import logging
from collections import Counter
from collections.abc import Sequence

import msgspec

from common import keys
from common.broker import Broker
from common.durable import About, Durable
from common.errors import BrokerError, WireError
from common.intake.answers import bad_request
from common.intake.models import Models
from common.intake.queues import KEPT_MAX
from common.job_settings import webhook_key
from common.key_settings import KeySettings
from common.queue import describe
from common.settings import GatewaySettings
from gateway import jobs
from gateway.durables import SINK, Durables
from gateway.metrics import GatewayMetrics
from gateway.sender import NotSentError, Sender
from gateway.webhook import again_s, signed

log = logging.getLogger("fairlane.gateway")

LOOK_S = 1.0
"""Ended jobs, and webhooks that are due, are looked for this often."""
TAKEN_MAX = 256
"""Most ids taken from one list, and most webhooks that are due looked at, at once."""
DUE_MAX = 100_000
"""Most webhooks that wait; what else has ended stays in its list, which keeps as many."""
LOCK_S = 60
"""A webhook is one gateway's for so long: longer than a try takes."""
USER_AGENT = "Fairlane-Webhooks"


class Webhooks:
    """Of one gateway. `run` sends them."""

    def __init__(
        self, broker: Broker, durables: Durables, models: Models, settings: GatewaySettings,
        configured: Sequence[KeySettings], replica: str, metrics: GatewayMetrics, sender: Sender,
    ) -> None:  # fmt: skip
        self._broker = broker
        self._jobs: Durable = durables.jobs
        self._lists: dict[str, str] = {}
        """Model -> its list of ended jobs."""
        self._models = models
        self._settings = settings
        self._replica = replica
        self._metrics = metrics
        self._sender = sender
        self._from = 0
        """How many of those that are due, from the first on, the next look leaves out."""
        self._running: dict[str, str] = {}
        """Jobs whose webhooks are on their way -> their owners."""
        self.configure(configured)

    def configure(self, configured: Sequence[KeySettings]) -> None:
        """Let these be the keys, with their secrets, from now on."""
        self._signing = [k for k in configured if k.webhook_secret is not None]

    def check(self, user: str) -> None:
        """Raises Refusal (400) where nothing can sign a user's webhooks."""
        if not self._secrets(user):
            text = "There are no webhooks here: no `webhook_secret` is set."
            raise bad_request(text, "webhook", "webhooks_not_configured")

    async def run(self) -> None:
        """Send what is due, until cancelled."""
        async with self._sender, asyncio.TaskGroup() as group:
            while True:
                try:
                    await self._collect()
                    for about in await self._due():
                        group.create_task(self._one(about))
                except BrokerError as e:
                    log.debug("webhooks: %s", e)
                await asyncio.sleep(LOOK_S)

    async def _collect(self) -> None:
        """Put jobs that have ended among those that are due. Each step may be repeated, by anyone:
        an id leaves its list once it is there."""
        if int(await self._broker.command("ZCARD", keys.WEBHOOKS)) >= DUE_MAX:
            return
        for model in {m.name for _, m in self._models.listing()}:
            ended = self._list_of(model)
            ids = await self._broker.command("LRANGE", ended, 0, TAKEN_MAX - 1)
            if not ids:
                continue
            now = await self._broker.now_ms()
            scored = [v for id in ids for v in (now, id)]
            await self._broker.command("ZADD", keys.WEBHOOKS, "NX", *scored)
            for id in ids:
                await self._broker.command("LREM", ended, 1, id)

    def _list_of(self, model: str) -> str:
        found = self._lists.get(model)
        if found is None:
            found = keys.ModelKeys(model).ended(SINK)
            if len(self._lists) < KEPT_MAX:
                self._lists[model] = found
        return found

    async def _due(self) -> list[About]:
        """Webhooks that are due and now ours to send. Raises BrokerError."""
        room = self._settings.webhooks_max - len(self._running)
        if room <= 0:
            return []
        now = await self._broker.now_ms()
        ids = await self._broker.command(
            "ZRANGEBYSCORE", keys.WEBHOOKS, "-inf", now, "LIMIT", self._from, TAKEN_MAX
        )
        # One user's may be the first of them all: who comes behind them is looked at too.
        self._from = self._from + TAKEN_MAX if len(ids) == TAKEN_MAX else 0
        users, found = Counter(self._running.values()), list[About]()
        for id in (i.decode() for i in ids):
            about = None if id in self._running else await self._described(id)
            if about is None or users[about.owner] >= max(1, self._settings.webhooks_max // 4):
                continue
            if not await self._broker.command(
                "SET", keys.WEBHOOK + id, self._replica, "NX", "EX", LOCK_S
            ):
                continue
            users[about.owner] += 1
            self._running[id] = about.owner
            found.append(about)
            if len(found) >= room:
                break
        return found

    async def _described(self, id: str) -> About | None:
        """A job whose webhook is to be sent; what is not any more leaves the set."""
        told = await self._broker.command("HGET", keys.JOBS + id, "told")
        try:
            about = None if told else await self._jobs.find(id)
        except WireError:
            about = None
        if about is None or not about.webhook:
            await self._broker.command("ZREM", keys.WEBHOOKS, id)
            return None
        return about

    async def _one(self, about: About) -> None:
        """Send one and write down what came of it; where Redis does not take that, it is sent again
        once the lock is over."""
        try:
            body = await self._broker.command("HGET", keys.JOBS + about.id, "hook")
            if body is None:
                status = await self._jobs.status(about)
                if not status.over:  # Redis forgot its end: it runs again, and ends again
                    await self._broker.command("ZREM", keys.WEBHOOKS, about.id)
                    return
                body = _payload(jobs.shown(status))
            taken = await self._send(about, body)
            await self._note(about, body, taken)
            await self._broker.command("DEL", keys.WEBHOOK + about.id)
        except (BrokerError, WireError) as e:
            log.debug("webhook of %s: %s", about.id, e)
        finally:
            del self._running[about.id]

    async def _send(self, about: About, body: bytes) -> bool:
        """One try; whether it was taken. Raises BrokerError."""
        secrets = self._secrets(about.user)
        if not secrets:  # they are gone from the configuration
            return False
        now_s = await self._broker.now_ms() // 1000
        headers = signed(f"msg_{about.id}", now_s, body, secrets)
        headers |= {"content-type": "application/json", "user-agent": USER_AGENT}
        try:
            status = await self._sender.post(about.webhook, body, headers)
        except NotSentError as e:
            log.info("the webhook of job %s was not sent: %s", about.id, e)
            return False
        if not 200 <= status < 300:
            log.info("the webhook of job %s was answered with %d", about.id, status)
        return 200 <= status < 300

    async def _note(self, about: About, body: bytes, taken: bool) -> None:
        """`body` is that of the next try too: the answer may be gone by then."""
        if taken:
            await describe(self._broker, about.id, "told")
            await self._broker.command("ZREM", keys.WEBHOOKS, about.id)
            self._metrics.webhook("delivered")
            return
        tries = await describe(self._broker, about.id, "hooks", body)
        if not tries:  # the job was deleted meanwhile
            await self._broker.command("ZREM", keys.WEBHOOKS, about.id)
            return
        again = again_s(about.id, tries)
        if again is None:
            log.warning("gave up the webhook of job %s after %d tries", about.id, tries)
            await self._broker.command("ZREM", keys.WEBHOOKS, about.id)
            self._metrics.webhook("given_up")
            return
        due = await self._broker.now_ms() + int(again * 1000)
        await self._broker.command("ZADD", keys.WEBHOOKS, "XX", due, about.id)
        self._metrics.webhook("refused")

    def _secrets(self, user: str) -> list[bytes]:
        own = [k.webhook_secret for k in self._signing if k.stands_for(user) and k.webhook_secret]
        found = own or [s for s in (self._settings.webhook_secret,) if s]
        return [webhook_key(secret) for secret in dict.fromkeys(found)]


def _payload(shown: dict[str, object]) -> bytes:
    """The event, without the answer: who gets it asks for that."""
    kept = {k: v for k, v in shown.items() if k not in ("result", "position", "eta", "webhook")}
    ended_s = shown["ended_at"] or shown["created_at"]
    assert isinstance(ended_s, int)
    at = datetime.datetime.fromtimestamp(ended_s, datetime.UTC).isoformat()
    return msgspec.json.encode({"type": f"job.{shown['state']}", "timestamp": at, "data": kept})
