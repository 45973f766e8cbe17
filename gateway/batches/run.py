"""One batch in the hands of a worker: what is known of it in this process, and its word to Redis.

All of it can be made again from Redis and the store: whoever takes the batch over does so.
"""

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry

from common.batch_settings import BatchSettings
from common.batch_state import About, State
from common.batches import LEASE_MS, SPARE_MS, Batches, Held
from common.broker import Broker
from common.errors import BrokerDown, BrokerUncertain
from common.intake.models import Models
from common.intake.policy import Policies
from common.intake.queues import Queues
from common.queue import Queue
from common.settings import Settings
from common.store import Store
from common.wire import ServedModel
from gateway.batches.lines import Index, Input
from gateway.batches.metrics import BatchMetrics
from gateway.batches.plan import SLICE, Done
from gateway.files import Files

log = logging.getLogger("fairlane.batches")

COMMIT_S = LEASE_MS / 1000
"""A commit that may have been made is repeated for so long: then the lease is over anyhow."""
AGAIN_S = 0.1
GONE_MS = 86_400_000
"""What a batch has in the store may be away until so long after its window."""


class LostError(Exception):
    """The batch is another's to run, or is gone."""


class ChangedError(Exception):
    """Its status is another than was thought."""


class Tools:
    """What all runs of a worker use."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        owner: str,
        files: Files,
        store: Store,
        registry: CollectorRegistry,
    ) -> None:
        self.settings: BatchSettings = settings.batch
        self.broker = broker
        self.owner = owner
        """The worker's id."""
        self.files = files
        self.store = store
        self.batches = Batches(broker, settings.batch.keep_days * 86_400_000)
        self.models = Models(broker, settings.models, waits=True)
        self.policies = Policies(settings.models, settings.gateway)
        self.queues = Queues(broker, self.policies)
        self.metrics = BatchMetrics(registry)
        self.reading = asyncio.Semaphore(32)
        """Answers read at once, of all batches: each may hold some frames."""


class Flight(msgspec.Struct):
    """A line that is on the queue, as far as is known."""

    attempt: int
    cls: str
    custom_id: str = ""
    """Empty: not read yet."""


class Run:
    """One batch, while its lease holds."""

    def __init__(self, tools: Tools, about: About, state: State, done: Done) -> None:
        self.tools = tools
        self.about = about
        self.state = state
        self.done = done
        self.fence = 0
        self.version = 0
        self.status = state.status
        self.flights: dict[int, Flight] = {}
        self.again: dict[int, int] = {}
        """Lines before the cursor that are not on the queue -> their attempt."""
        self.bytes = 0
        """Of the requests in `flights`."""
        self.recovered = False
        """Whether the lines before the cursor have been looked for."""
        self.extras: list[str] = []
        """Jobs that ended and of which the list of ended ones does not tell."""
        self.bad: list[tuple[int, bytes]] = []
        """(line, its line of the error file) of requests that no engine can be asked for."""
        self.seen_at: float | None = None
        """Since when there are results that are not written down; None: there are none."""
        self.slice = SLICE
        """Answers read at once."""
        self.look_at: float | None = None
        """When flights are to be looked for, as Redis may have lost some."""
        self.full_until = 0.0
        self.full_s = 0.0
        self.epoch = 0
        """The connection to Redis on which flights were last looked for."""
        self.input: Input | None = None
        self._commits = 0
        self._offset_ms = 0.0

    def held(self, held: Held) -> None:
        """The lease is ours."""
        self.fence, self.version = held.fence, held.version
        self.heard(held)

    def heard(self, held: Held) -> None:
        """What Redis says."""
        self._offset_ms = held.now_ms - _loop_ms()
        if held.status:
            self.status = held.status

    @property
    def now_ms(self) -> int:
        """Of the Redis clock."""
        return int(self._offset_ms + _loop_ms())

    @property
    def age_s(self) -> float:
        """Since it was made."""
        return max(0.0, (self.now_ms - self.about.created_ms) / 1000)

    @property
    def late(self) -> bool:
        """Whether what is not in the store any more is given up."""
        return self.now_ms >= self.about.expires_ms + GONE_MS

    @property
    def queue(self) -> Queue:
        """That of its model."""
        return self.tools.queues.of(self.state.model)

    @property
    def served(self) -> ServedModel:
        """Its model, as dispatchers serve it now."""
        name = self.state.model
        return self.tools.models.resolve(name) or ServedModel(name, [], False, 0, 0.0)

    @property
    def index(self) -> Index:
        """Where its lines are; there once it is validated."""
        assert self.input is not None
        return self.input.index

    def open(self, index: Index) -> None:
        """Its lines can be read."""
        about = self.about
        self.input = Input(self.tools.files, about.owner, about.input_file_id, index)

    def put(self, line: int, flight: Flight) -> None:
        """The line is on the queue."""
        if line not in self.flights:
            self.bytes += self.index.size(line)
        self.flights[line] = flight
        self.again.pop(line, None)

    def land(self, line: int) -> Flight | None:
        """It is not any more."""
        flight = self.flights.pop(line, None)
        if flight is not None:
            self.bytes -= self.index.size(line)
        return flight

    def part_name(self, kind: str) -> str:
        """A part that no other commit has, by whomever: `o` of the output file, `e` of the error
        file."""
        return f"{self.fence}-{self._commits}.{kind}"

    async def commit(
        self,
        *,
        expect: str = "",
        lines: tuple[int, ...] | list[int] = (),
        parts: tuple[str, ...] | list[str] = (),
        keep: bool = False,
        fields: Mapping[str, str | int | bytes],
    ) -> None:
        """Write down what was done; `fields` are those of the state, and times. `keep`: it is over,
        and kept for so long as such are. Raises LostError, ChangedError (then nothing was written),
        BrokerError (then it may have been)."""
        batches = self.tools.batches
        mark = f"{self.fence}-{self._commits}"
        left_ms = max(0, self.about.expires_ms - self.now_ms)
        keep_ms = batches.keep_ms + (0 if keep else left_ms + SPARE_MS)
        deadline = asyncio.get_running_loop().time() + COMMIT_S
        while True:
            try:
                held = await batches.commit(
                    self.about.id, self.tools.owner, self.fence, mark, expect=expect, lines=lines,
                    parts=parts, fields=fields, keep_ms=keep_ms,
                )  # fmt: skip
                break
            except (BrokerDown, BrokerUncertain):
                if not await self.tools.broker.back(AGAIN_S, deadline):
                    raise
        self.heard(held)
        if held.word == "changed":
            raise ChangedError
        if held.word != "done":
            raise LostError
        self._commits += 1
        self.version = held.version
        self.state = _with(self.state, fields)
        for line in lines:
            self.done.add(line)


def _with(state: State, fields: Mapping[str, str | int | bytes]) -> State:
    """The state with fields as they were written."""
    changes: dict[str, object] = {}
    times = dict(state.times)
    for name, value in fields.items():
        if name.endswith("_at"):
            times[name] = int(value)
        elif name == "errors":
            assert isinstance(value, bytes)
            changes[name] = msgspec.json.decode(value)
        else:
            changes[name] = value
    return msgspec.structs.replace(state, times=times, **changes)


def _loop_ms() -> float:
    return asyncio.get_running_loop().time() * 1000
