"""What is done to the processes while the batches run, and what they hold."""

import asyncio

from tests.support.batches import BatchFleet


class Memory:
    """The most that each role held."""

    def __init__(self, fleet: BatchFleet) -> None:
        self._roles = {
            "gateway": fleet.gateways, "dispatcher": fleet.dispatchers, "worker": fleet.workers,
        }  # fmt: skip
        self.most: dict[str, int] = {}

    async def watch(self) -> None:
        """Each second, until cancelled."""
        while True:
            for name, roles in self._roles.items():
                held = max((role.rss() for role in roles if role.alive()), default=0)
                self.most[name] = max(held, self.most.get(name, 0))
            await asyncio.sleep(1.0)


class Kills:
    """kill -9, of one part after the other; each is started again."""

    def __init__(self, fleet: BatchFleet) -> None:
        self._fleet = fleet
        self.killed: list[str] = []

    async def each(self, every_s: float) -> None:
        """The busiest worker, the leading dispatcher, the last gateway, an engine, Redis; then
        again, until cancelled."""
        while True:
            for kill in (self._worker, self._leader, self._gateway, self._engine, self._redis):
                await asyncio.sleep(every_s)
                self.killed.append(kill())
                await asyncio.to_thread(self._fleet.heal)

    def _worker(self) -> str:
        busy = max(self._fleet.workers, key=lambda r: r.metric("fairlane_batches_running"))
        busy.kill()
        return busy.name

    def _leader(self) -> str:
        leads = self._fleet.leader(self._fleet.models[0]) or self._fleet.dispatchers[0]
        leads.kill()
        return leads.name

    def _gateway(self) -> str:
        self._fleet.gateways[-1].kill()
        return self._fleet.gateways[-1].name

    def _engine(self) -> str:
        self._fleet.engines[-1].kill()
        return self._fleet.engines[-1].name

    def _redis(self) -> str:
        self._fleet.server.kill()
        self._fleet.server.start()
        return "redis"
