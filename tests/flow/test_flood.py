"""A flood: the engine's own queue stays short, and no slot stays free while jobs wait."""

import asyncio

import pytest

from sim.engine import Gauges
from sim.settings import EngineSettings
from tests.flow.world import World, world
from tests.support.wait import pass_time

LIMIT = 3
STEP_MS = 50.0
PREFILL_S = 0.001
SAMPLE_S = 0.004


class Witness:
    """Watches every instant of the engines, once all that is ready has run."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.peak = dict.fromkeys(w.engines, 0)
        self.idle_since: dict[str, float | None] = dict.fromkeys(w.engines)
        self.longest_idle = 0.0
        self.breaches: list[str] = []
        for host, transport in w.engines.items():
            transport.observer = lambda gauges, host=host: self._seen(host, gauges)  # type: ignore[misc]

    def _seen(self, host: str, gauges: Gauges) -> None:
        self.peak[host] = max(self.peak[host], gauges.waiting)

    async def watch(self, slots: int, ramp_s: float) -> None:
        """Until the queue is empty: work conservation at each instant sampled."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            leader = self.w.leader()
            assert leader is not None
            model = leader._loops["m1"]
            if not model.busy():
                return
            for _ in range(200):
                await asyncio.sleep(0)  # all that is ready now runs
            if not model.busy():
                return
            now = loop.time()
            for backend in model.backends:
                counts = backend.load.counts(now)
                host = backend.url.removeprefix("http://")
                engine = self.w.engines[host]
                free = slots - engine.running()
                full = counts.unstarted + counts.foreign >= LIMIT
                if not full and counts.inflight < slots + LIMIT:
                    self.breaches.append(f"{now:.3f}: {host} {counts}, free {free}")
                if free > 0 and engine.waiting() == 0 and now - began > ramp_s:
                    since = self.idle_since[host]
                    self.idle_since[host] = now if since is None else since
                    self.longest_idle = max(self.longest_idle, now - (since or now))
                else:
                    self.idle_since[host] = None
            await pass_time(SAMPLE_S)


@pytest.mark.looptime
async def test_a_flood_of_500_never_floods_nor_starves_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = 8
    engines = {
        h: EngineSettings(
            model="m1", max_num_seqs=slots, step_ms=STEP_MS, per_seq_us=0.0, seed=n,
            prefill_tokens_per_s=20_000,
        )
        for n, h in enumerate(("e1", "e2"))
    }  # fmt: skip
    async with world(monkeypatch, engines, model={"reserved_slots": 0}) as w:
        witness = Witness(w)
        for n in range(500):
            await w.ask(f"u{n % 5}", output=2 + n % 7, stream=n % 10 != 0)
        await witness.watch(slots, ramp_s=1.0)
        await w.answers()
        assert {str(a.outcome) for a in w.asked} == {"finished"}
        # These jobs are short: beyond the limit there is what ends while one is on its way.
        assert LIMIT <= max(witness.peak.values()) <= 2 * LIMIT
        assert witness.breaches == []
        assert witness.longest_idle <= PREFILL_S + STEP_MS / 1000 + SAMPLE_S
