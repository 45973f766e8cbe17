"""One dispatcher's part in the election for one model: asks Redis when `election.py` says so."""

import asyncio
import logging
from collections.abc import Callable

from common.errors import BrokerError
from common.queue import Queue
from common.settings import DispatcherSettings
from dispatcher.election import Action, Election

log = logging.getLogger("fairlane.leadership")

LOOK_S = 0.1
"""The election is asked at least this often."""
HOLD_MS = 2_000
"""After Redis lost the leader's hash nothing is popped for so long: dispatchers first assert."""
LEAVE_S = 2.0
"""How long a leader that stops tries to give up the lead; then its lease runs out."""


class Leadership:
    """Takes, renews and gives up the lead of one model."""

    def __init__(
        self,
        queue: Queue,
        owner: str,
        settings: DispatcherSettings,
        known: Callable[[str], bool],
        changed: Callable[[bool], None],
    ) -> None:
        """`known`: whether `fl:models` has held the model for a while; `changed` is told when the
        lead is won or lost."""
        self._queue = queue
        self._owner = owner
        self._settings = settings
        self._known = known
        self._changed = changed
        self.election = Election(
            owner, queue.model, lease_ms=settings.leader_lease_ms,
            renew_ms=settings.leader_renew_ms,
        )  # fmt: skip
        self._ask = asyncio.Event()
        self._left = asyncio.Event()

    def leads(self) -> bool:
        """Whether this dispatcher led when Redis was last heard."""
        return self.election.leads

    async def run(self) -> None:
        """Until cancelled; the lead then ends with its lease, or by `stop` before."""
        now = asyncio.get_running_loop().time
        while True:
            action = self.election.tick(now())
            if action is None:
                self._ask.clear()
                await wait(self._ask, min(LOOK_S, max(0.005, self.election.wait(now()))))
            else:
                await self._call(action)

    async def _call(self, action: Action) -> None:
        election, model = self.election, self._queue.model
        led = election.leads
        hold = action == "take" and (election.has_led or self._known(model))
        now = asyncio.get_running_loop().time
        try:
            reply = await self._queue.lead(
                action, self._owner, term=election.term,
                lease_ms=self._settings.leader_lease_ms,
                grace_ms=self._settings.dead_after_ms, hold_ms=HOLD_MS if hold else 0,
            )  # fmt: skip
        except BrokerError:
            election.failed(now())
            return
        election.led(now(), reply)
        if reply.word == "given":
            self._left.set()
            await self._tell()
        if election.leads != led:
            log.info("%s: %s", model, "leading" if election.leads else "not leading")
            self._changed(election.leads)

    async def _tell(self) -> None:
        """Ring for the heir, which else would wait until the lease has run out."""
        bell = f"give {self._owner} -".encode()
        try:
            await self._queue.broker.publish(self._queue.keys.bell, bell)
        except BrokerError as e:
            log.debug("%s: giving up the lead: %s", self._queue.model, e)

    def freed(self, giver: str) -> None:
        """The bell says that the leader gave up the lead."""
        self.election.freed(asyncio.get_running_loop().time(), giver)
        self._ask.set()

    async def stop(self) -> None:
        """Give up the lead at once, and never take it again."""
        self.election.leave()
        self._ask.set()
        if self.election.leads:
            await wait(self._left, LEAVE_S)


async def wait(event: asyncio.Event, timeout: float) -> None:
    """Until the event is set or `timeout` seconds have passed."""
    if event.is_set():
        return
    try:
        async with asyncio.timeout(timeout):
            await event.wait()
    except TimeoutError:
        return
