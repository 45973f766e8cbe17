"""The commands that talk to a gateway: `fairlane batch` and `fairlane jobs`."""

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from common.config import API_KEY, API_URL
from fairlane.api import Api
from fairlane.batch_run import Run
from fairlane.jobs_show import cancelled, followed, listed, shown

Command = Callable[..., Any]


def _options(command: Command) -> Command:
    for option in (
        click.option("--key", envvar=[API_KEY, "OPENAI_API_KEY"], metavar="SECRET",
                     help="API key; or FAIRLANE_API_KEY, or OPENAI_API_KEY."),
        click.option("--url", envvar=API_URL, default="http://127.0.0.1:8000",
                     show_default=True, help="A gateway; or FAIRLANE_API_URL."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.group()
def batch() -> None:
    """Files of requests that may take their time."""


@batch.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True,
              help="Where the answers go.")  # fmt: skip
@click.option("--errors", type=click.Path(dir_okay=False, path_type=Path),
              help="Where failed lines go; default: OUT with .errors behind it.")  # fmt: skip
@click.option("--endpoint", help="Default: the `url` of the first line.")
@click.option("--window", default="24h", show_default=True, help="It may take so long.")
@click.option("--overwrite", is_flag=True, help="Ask again where OUT is there already.")
@click.option("--keep", is_flag=True, help="Leave the files with the gateway.")
@_options
def run(
    file: Path, out: Path, errors: Path | None, endpoint: str | None, window: str, keep: bool,
    overwrite: bool, url: str, key: str | None,
) -> None:  # fmt: skip
    """Send FILE (OpenAI's batch input, JSONL) through the Batch API and wait for its answers.

    Interrupted, the batch goes on: the same command takes it up again. Exit code 0 where every
    line has an answer, 1 where some have none, 2 where the gateway cannot be used.
    """
    errors = errors or out.with_name(out.name + ".errors")
    try:
        with Api(url, key) as api:
            fine = Run(
                api, url, file, out, errors, endpoint=endpoint, window=window, keep=keep,
                overwrite=overwrite, wait=time.sleep,
            ).run()  # fmt: skip
    except KeyboardInterrupt:
        click.echo("\nThe batch goes on: the same command takes it up again.", err=True)
        sys.exit(130)
    sys.exit(0 if fine else 1)


@click.group()
def jobs() -> None:
    """Durable jobs of your key."""


@jobs.command()
@click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 100))
@_options
def ls(limit: int, url: str, key: str | None) -> None:
    """List the newest, one a line. A narrow terminal shows less of each; a pipe or file all."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    with Api(url, key) as api:
        click.echo(listed(api, limit, width))


@jobs.command()
@click.argument("job")
@_options
def show(job: str, url: str, key: str | None) -> None:
    """Show one, with its answer once it has one."""
    with Api(url, key) as api:
        click.echo(shown(api, job))


@jobs.command()
@click.argument("job")
@_options
def cancel(job: str, url: str, key: str | None) -> None:
    """Stop one, wherever it is; one that has ended stays as it is, with its answer."""
    with Api(url, key) as api:
        click.echo(cancelled(api, job))


@jobs.command()
@click.argument("job")
@click.option("--raw", is_flag=True, help="The events as they are.")
@_options
def follow(job: str, raw: bool, url: str, key: str | None) -> None:
    """Print its answer as it comes, from the beginning. Exit code 1 where the job fails."""
    out = sys.stdout.buffer
    with Api(url, key) as api:
        for part in followed(api, job, raw=raw, wait=time.sleep):
            out.write(part)
            out.flush()
