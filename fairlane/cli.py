"""The command `fairlane`."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, get_args

import click
import uvloop

from common import logs
from common.errors import BrokerError, ConfigError
from fairlane import roles
from fairlane.cli_api import batch, jobs
from fairlane.probe import probe
from fairlane.reload import Configuration
from fairlane.text import checked
from sim.settings import EngineSettings, Face

Command = Callable[..., None]


def _options(command: Command) -> Command:
    """The options every role takes; they win over the environment, which wins over the file."""
    for option in (
        click.option("--log-level", default="INFO", show_default=True,
                     type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"])),
        click.option("--insecure", is_flag=True, help="Listen beyond loopback without keys."),
        click.option("--port", type=click.IntRange(0, 65535),
                     help="Port to listen on; 0: a free one."),
        click.option("--host", help="Address to listen on (default 127.0.0.1)."),
        click.option("--backend", "backends", multiple=True, metavar="URL",
                     help="An engine; its models are read from /v1/models. May be repeated."),
        click.option("--redis", metavar="URL", help="redis://host:port/db"),
        click.option("--config", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                     help="fairlane.toml"),
    ):  # fmt: skip
        command = option(command)
    return command


def _settings(
    config: Path | None,
    redis: str | None,
    backends: tuple[str, ...],
    host: str | None,
    port: int | None,
    insecure: bool,
    log_level: str,
    metrics_port: int | None = None,
    metrics_host: str | None = None,
    batch_port: int | None = None,
    batch_host: str | None = None,
) -> Configuration:
    logs.setup(log_level)
    options: dict[str, Any] = {"gateway": {}, "dispatcher": {}, "batch": {}}
    if redis is not None:
        options["redis"] = {"url": redis}
    if backends:
        options["backends"] = [{"url": b} for b in backends]
    for section, name, value in (
        ("gateway", "host", host),
        ("gateway", "port", port),
        ("gateway", "insecure", insecure or None),
        ("dispatcher", "metrics_port", metrics_port),
        ("dispatcher", "metrics_host", metrics_host),
        ("batch", "metrics_port", batch_port),
        ("batch", "metrics_host", batch_host),
    ):
        if value is not None:
            options[section][name] = value
    return Configuration(config, options)


def _run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a role; what can be expected to go wrong is one line, never a traceback."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except* (ConfigError, BrokerError) as group:
        error = _first(group)
        sys.exit(_fail(str(error)))
    except* KeyboardInterrupt:
        sys.exit(130)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _fail(text: str) -> int:
    click.echo(f"fairlane: {text}", err=True)
    return 2


def _load(**options: Any) -> Configuration:
    try:
        return _settings(**options)
    except ConfigError as e:
        sys.exit(_fail(str(e)))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="fairlane")
def main() -> None:
    """Fairlane: a distributed fair queue in front of LLM engines."""


main.add_command(batch)
main.add_command(jobs)


@main.command()
@_options
def up(**options: Any) -> None:
    """Run everything in one process: gateway, dispatcher, and, without --backend, two simulated
    engines; without --redis, on an embedded broker (for trying it, not for work)."""
    configuration = _load(**options)
    _run(lambda: roles.run_up(configuration, click.echo))


@main.command()
@_options
def gateway(**options: Any) -> None:
    """Run one gateway replica: takes OpenAI requests and streams the answers back."""
    configuration = _load(**options)
    _run(lambda: roles.run_gateway(configuration))


@main.command()
@_options
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve /metrics here (the same as --port).",
)
@click.option("--metrics-host", help="Address for --metrics-port (the same as --host).")
def dispatcher(**options: Any) -> None:
    """Run one dispatcher: takes jobs in fair order and runs them on the engines."""
    for name in ("host", "port"):  # a dispatcher listens for its metrics alone
        if options[f"metrics_{name}"] is None:
            options[f"metrics_{name}"] = options[name]
        options[name] = None
    configuration = _load(**options)
    _run(lambda: roles.run_dispatcher(configuration))


@main.command()
@_options
def batch_worker(**options: Any) -> None:
    """Run one batch worker: brings the batches of /v1/batches through the queue. With --port it
    serves /metrics there."""
    options |= {"batch_port": options["port"], "batch_host": options["host"]}
    options |= {"port": None, "host": None}
    configuration = _load(**options)
    _run(lambda: roles.run_batch_worker(configuration))


@main.command()
@_options
def check(**options: Any) -> None:
    """Validate the configuration and probe Redis and the backends. Exit 1 where one fails."""
    settings = _load(**options).settings
    found = asyncio.run(probe(settings))
    click.echo(checked(settings, found))
    sys.exit(0 if all(ok for _, ok, _ in found) else 1)


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", default=9000, show_default=True, type=click.IntRange(0, 65535))
@click.option("--model", "models", multiple=True, default=["sim"], show_default=True,
              help="Served name; may be repeated.")  # fmt: skip
@click.option("--engine", default="vllm", show_default=True,
              type=click.Choice(get_args(Face)), help="Whose metrics and refusals.")  # fmt: skip
@click.option("--max-num-seqs", default=8, show_default=True, type=click.IntRange(1, 10_000),
              help="Slots.")  # fmt: skip
@click.option("--step-ms", default=20.0, show_default=True, type=click.FloatRange(0.01, 10_000),
              help="Time of one step.")  # fmt: skip
@click.option("--per-seq-us", default=50.0, show_default=True, type=click.FloatRange(0),
              help="How much longer a step is for each sequence in it.")  # fmt: skip
@click.option("--prefill-tokens-per-s", default=20_000.0, show_default=True,
              type=click.FloatRange(1))  # fmt: skip
@click.option("--mean-output-tokens", default=128, show_default=True, type=click.IntRange(1))
@click.option("--kv-tokens", default=262_144, show_default=True, type=click.IntRange(8_192))
@click.option("--seed", default=0, show_default=True, type=int)
@click.option("--priority-mode", is_flag=True, help="Lower `priority` first.")
@click.option("--max-num-queued-reqs", type=click.IntRange(0), help="Above it: refused.")
@click.option("--metrics-delay", default=0.0, show_default=True, type=click.FloatRange(0),
              help="Seconds by which the gauges of /metrics are old.")  # fmt: skip
def sim(host: str, port: int, models: tuple[str, ...], **values: Any) -> None:
    """Run one simulated engine: an engine's HTTP interface over a model of vLLM's scheduler."""
    logs.setup()
    try:
        settings = EngineSettings(model=tuple(models), **values)
    except ValueError as e:
        sys.exit(_fail(str(e)))

    _run(lambda: roles.run_sim(settings, host, port))
