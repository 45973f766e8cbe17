"""`python -m bench.batches.upload`: a large input, uploaded and validated again and again.

A process of its own, so that what it costs is not measured as others' waiting.
"""

import asyncio
from pathlib import Path
from time import monotonic

import click
import openai

from bench.batches.lines import MODEL
from tests.support.batches import chat_lines
from tests.support.wait import wait_until

LINES, TEXT = 50_000, " and" * 1_000
"""An input of 200 MB."""
EVERY_S = 10.0
"""An upload begins so often: 20 MB/s."""
VALID_S = 120.0


async def uploads(url: str, key: str, path: Path, seconds: float) -> int:
    """For so long, and the one under way to its end; how many they were. Each batch is cancelled
    once its lines are known to be good."""
    begin, n = monotonic(), 0
    end = begin + seconds
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key=key) as client:
        while monotonic() < end:
            with path.open("rb") as data:
                file = await client.files.create(file=data, purpose="batch")
            made = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )

            async def valid(id: str = made.id) -> bool:
                return (await client.batches.retrieve(id)).status != "validating"

            await wait_until(valid, timeout=VALID_S, what="a batch's validation")
            await client.batches.cancel(made.id)
            await client.files.delete(file.id)
            n += 1
            await asyncio.sleep(max(0.0, begin + n * EVERY_S - monotonic()))
    return n


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--url", required=True, help="Of a gateway.")
@click.option("--key", required=True)
@click.option("--seconds", required=True, type=float)
@click.argument("path", type=click.Path(path_type=Path))
def main(url: str, key: str, seconds: float, path: Path) -> None:
    """Write the input to PATH, upload it for so long, and print how often."""
    path.write_bytes(chat_lines(LINES, model=MODEL, text=TEXT))
    click.echo("begins")
    click.echo(asyncio.run(uploads(url, key, path, seconds)))


if __name__ == "__main__":
    main()
