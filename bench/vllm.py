"""Fairlane in front of a real vLLM on the CPU: `python -m bench.vllm --dir DIR`.

Starts vLLM (installs it into DIR first where it is not there), a Redis, a gateway and a dispatcher,
sends mixed requests, wrong ones, a flood, and disconnects; compares answers with the engine's own
byte for byte, and the counts with its metrics. Prints a table; exit code 1 where a line fails. Logs
stay in DIR/logs, and DIR/serve.log is vLLM's.
"""

import argparse
import asyncio
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.vllm_engine import MODEL, SLOTS, Asker, Report, Role, Vllm
from bench.vllm_responses import responses
from bench.vllm_trial import Trial


async def trial(engine: Vllm, redis_url: str, roles: Sequence[Role], n: int) -> Report:
    """All phases against running processes."""
    report = Report()
    ask = Asker(engine.url, roles[0].url, redis_url)
    try:
        await Trial(ask, roles[0], roles[1], report, n).run()
        await responses(roles[0].url, report)
    except Exception as e:
        error = e.exceptions[0] if isinstance(e, ExceptionGroup) else e
        report.add(False, "the run went to its end", f"{error!r} {getattr(error, '_request', '')}")
    finally:
        await ask.close()
    return report


def main() -> int:
    """Start everything, run, print, end everything."""
    parser = argparse.ArgumentParser(prog="bench.vllm", description=__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="where vLLM is, or is put")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--flags", default="", help="more flags for vLLM, as one word")
    options = parser.parse_args()
    from tests.support.processes import Role
    from tests.support.redis_server import RedisServer, free_port

    # So that it ends what it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = options.dir.resolve()
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    engine = Vllm(folder, free_port(), shlex.split(options.flags))
    with engine, RedisServer() as server:
        config = logs / "fairlane.toml"
        backend = f'{{ url = "{engine.url}", max_num_seqs = {SLOTS} }}'
        config.write_text(f"[models.{MODEL}]\nbackends = [{backend}]\n")
        common = ["--config", str(config), "--redis", server.url]
        roles = [
            Role("gateway", ["gateway", *common, "--port", "0"], logs),
            Role("dispatcher", ["dispatcher", *common, "--metrics-port", "0"], logs),
        ]
        try:
            for role in roles:
                role.start()
            for role in roles:
                role.wait_ready("/readyz")
            report = asyncio.run(trial(engine, server.url, roles, options.requests))
            codes = [role.stop() for role in roles]
            report.add(codes == [0, 0], "gateway and dispatcher end at SIGTERM", str(codes))
        finally:
            for role in roles:
                role.close()
    print(f"\n{report.table()}")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
