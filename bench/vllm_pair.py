"""Two real vLLMs on the CPU, alone and behind Fairlane: `python -m bench.vllm_pair --dir DIR`.

A flood of one user and light ones who ask by turns, once sent straight to both engines by
turns and once through Fairlane: who waits how long, and what the engines do in a second. Then the
same flood while one engine is ended as an operator would, started again, and the other is drained:
every answer must be whole. Exit code 1 where one is not, or where anything is left over.
"""

import argparse
import asyncio
import contextlib
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx

from bench.report import percentile
from bench.vllm_engine import MODEL, SLOTS, Asker, Report, Vllm, until
from bench.vllm_pair_flood import LIGHT, Flood, Plan

TURN_S = 900.0
"""No phase takes longer."""
SHUTDOWN_S = 60
"""vLLM finishes what runs for so long after SIGTERM: without it open streams hang for ever."""
ACK_S = 5.0
"""The last end is acknowledged within this."""
ADMIN = "sk-admin"


class Trial:
    """The phases, against running processes."""

    def __init__(
        self, engines: Sequence[Vllm], gateway: str, redis_url: str, report: Report, plan: Plan
    ) -> None:
        self._engines = engines
        self._gateway = gateway
        self._redis_url = redis_url
        self._report = report
        self._plan = plan
        self._urls = [engine.url for engine in engines]

    async def run(self) -> None:
        """All of them."""
        asker = Asker(self._urls[0], self._gateway, self._redis_url)
        try:
            for url in self._urls:  # an engine's first requests take seconds
                await Flood(
                    [url], self._urls, Plan(heavy=2, light_every_s=1.0, light_alone=2)
                ).run()
            alone = await self._flood("alone", self._urls, light_only=True)
            direct = await self._flood("direct", self._urls)
            through = await self._flood("Fairlane", [self._gateway])
            self._compare(alone, direct, through)
            await self._trouble(asker)
            left = await self._left(asker)
            self._report.add(not left, "nothing left over in Redis", str(left or 0))
        finally:
            await asker.close()

    async def _left(self, asker: Asker) -> list[str]:
        """What stays in Redis once the last end was acknowledged, or it was waited for too long."""
        with contextlib.suppress(TimeoutError):
            await until(lambda: _nothing(asker), "the last acknowledgement", ACK_S)
        return await asker.leftovers()

    async def _flood(self, name: str, goals: Sequence[str], *, light_only: bool = False) -> Flood:
        plan = self._plan.alone() if light_only else self._plan
        flood = Flood(goals, self._urls, plan)
        async with asyncio.timeout(TURN_S):
            await flood.run()
        self._tell(name, flood)
        if flood.heavy:
            rate = f"{flood.tokens_per_s:.0f}"
            self._report.add(True, f"{name}: engines' tokens a second", rate)
        return flood

    def _tell(self, name: str, flood: Flood) -> None:
        bad, n = [got.flaw for got in flood.all if got.flaw], len(flood.all)
        figure = f"{n - len(bad)} of {n} {bad[:3] or ''}"
        self._report.add(not bad, f"{name}: whole answers", figure)
        for who, waits in (("light", flood.light), ("heavy", flood.heavy)):
            if waits:
                p50, p95 = (percentile([w.first_s for w in waits], s) for s in (0.5, 0.95))
                what = f"{name}: {who} users' time to first token, p50 / p95"
                self._report.add(True, what, f"{p50:.2f} / {p95:.2f} s of {len(waits)}")

    def _compare(self, alone: Flood, direct: Flood, through: Flood) -> None:
        waits = [percentile([g.first_s for g in f.light], 0.95) for f in (alone, direct, through)]
        figure = f"{waits[1] / waits[2]:.1f}, {waits[2] / waits[0]:.1f} x alone"
        self._report.add(True, "light users' p95, times better than direct", figure)
        share = through.tokens_per_s / direct.tokens_per_s
        self._report.add(True, "tokens a second, share of direct", f"{share:.3f}")

    async def _trouble(self, asker: Asker) -> None:
        """The flood while engine 1 goes and comes back, and then engine 0 is drained."""
        flood = Flood([self._gateway], self._urls, self._plan.without_end())
        async with asyncio.timeout(TURN_S), asyncio.TaskGroup() as group:
            running = group.create_task(flood.run())
            await until(lambda: _true(flood.begun >= SLOTS), "the flood runs")
            self._engines[1].terminate()
            await until(lambda: _true(self._engines[1].ended), "engine 1 has ended", 2 * SHUTDOWN_S)
            open_then = flood.open
            self._engines[1].start()
            await asyncio.to_thread(self._engines[1].wait_ready)
            before = await flood.generated(1)
            await until(lambda: self._more(flood, before), "engine 1 serves again", TURN_S)
            figure = f"{open_then} then, {flood.open} now"
            self._report.add(True, "engine 1 ended and came back, with requests open", figure)
            await self._drain(flood)
            flood.enough = True
            await running
        self._tell("in trouble", flood)
        for n, url in enumerate(self._urls):
            asker.engine = url
            page = await asker.page()
            idle = page.running == page.waiting == 0
            self._report.add(idle, f"engine {n} is empty", f"{page.running}, {page.waiting}")

    async def _more(self, flood: Flood, before: int) -> bool:
        return await flood.generated(1) > before

    async def _drain(self, flood: Flood) -> None:
        """Engine 0 gets nothing more, and finishes what it has."""
        url = self._urls[0]
        async with httpx.AsyncClient(base_url=self._gateway, trust_env=False) as http:
            answer = await http.post(
                "/admin/backends/drain", headers={"authorization": f"Bearer {ADMIN}"},
                json={"url": url},
            )  # fmt: skip
        answer.raise_for_status()
        await until(lambda: flood.empty(0), "engine 0 has finished what it had", 120.0)
        made, done = await flood.generated(0), len(flood.all)
        more = done + 4 * SLOTS
        await until(lambda: _true(len(flood.all) >= more), "the other goes on", TURN_S)
        after = await flood.generated(0)
        self._report.add(after == made, "engine 0, drained, gets nothing", f"{after - made} tokens")


async def _nothing(asker: Asker) -> bool:
    return not await asker.leftovers()


async def _true(value: bool) -> bool:
    return value


def main() -> int:
    """Start everything, run, print, end everything."""
    parser = argparse.ArgumentParser(prog="bench.vllm_pair", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where vLLM is, or is put")
    parser.add_argument("--requests", type=int, default=80, help="of the flood")
    parser.add_argument("--flags", default="", help="more flags for vLLM, as one word")
    options = parser.parse_args()
    from tests.support.processes import Role
    from tests.support.redis_server import RedisServer, free_port

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends what it started
    folder = options.dir.resolve()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    flags = ["--shutdown-timeout", str(SHUTDOWN_S), *shlex.split(options.flags)]
    engines = [Vllm(folder, free_port(), flags, f"serve{n}.log") for n in range(2)]
    report = Report()
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        server = stack.enter_context(RedisServer())
        config = logs / "pair.toml"
        config.write_text(_config(engines))
        common = ["--config", str(config), "--redis", server.url]
        roles = [
            Role("pair-gateway", ["gateway", *common, "--port", "0"], logs),
            Role("pair-dispatcher", ["dispatcher", *common, "--metrics-port", "0"], logs),
        ]
        for role in roles:
            stack.callback(role.close)
            role.start()
        for role in roles:
            role.wait_ready("/readyz")
        plan = Plan(heavy=options.requests)
        trial = Trial(engines, roles[0].url, server.url, report, plan)
        _run(trial.run, report)
        codes = [role.stop() for role in roles]
        report.add(codes == [0, 0], "gateway and dispatcher end at SIGTERM", str(codes))
    print(f"\n{report.table()}")
    return 1 if report.failed else 0


def _run(trial: Callable[[], Awaitable[None]], report: Report) -> None:
    async def whole() -> None:
        await trial()

    try:
        asyncio.run(whole())
    except Exception as e:
        error = e.exceptions[0] if isinstance(e, ExceptionGroup) else e
        report.add(False, "the run went to its end", repr(error))


def _config(engines: Sequence[Vllm]) -> str:
    backends = ", ".join(f'{{ url = "{e.url}", max_num_seqs = {SLOTS} }}' for e in engines)
    keys = "".join(
        f'[[keys]]\nsecret = "sk-{user}"\nuser = "{user}"\n' for user in ("heavy", *LIGHT)
    )
    admin = f'[[keys]]\nsecret = "{ADMIN}"\nuser = "admin"\nrole = "admin"\n'
    # One user may have the whole flood waiting.
    limits = "[gateway]\nuser_jobs_max = 10_000\n"
    return f"{limits}[models.{MODEL}]\nbackends = [{backends}]\n{keys}{admin}"


if __name__ == "__main__":
    sys.exit(main())
