"""A store that is away for a while: what is not found in it then is not gone. Virtual time."""

import pytest

from gateway.batches import run as runs
from tests.flow.batch_world import BatchWorld, jsonl, request
from tests.flow.test_batches import engine, ids
from tests.flow.world import world
from tests.support.wait import pass_time, wait_until

pytestmark = pytest.mark.looptime

LINES = 40


class Away:
    """An empty folder where the store was, as before something is mounted on it."""

    def __init__(self, b: BatchWorld) -> None:
        self._b = b
        self._kept: dict[str, bytes] = {}

    def __enter__(self) -> None:
        self._kept = dict(self._b.objects)
        self._b.objects.clear()

    def __exit__(self, *exc: object) -> None:
        self._b.objects.clear()
        self._b.objects.update(self._kept)


@pytest.mark.parametrize("taken", [False, True], ids=["another's", "the same worker's"])
@pytest.mark.parametrize("how", ["completed", "cancelled", "expired"])
@pytest.mark.parametrize("at", [0.3, 2.0])
async def test_no_line_is_lost(
    monkeypatch: pytest.MonkeyPatch, how: str, taken: bool, at: float
) -> None:
    """Before the first result is written down, and later."""
    async with world(monkeypatch, {"e1": engine(max_num_seqs=2)}) as w:
        b = await BatchWorld(w, ahead_lines=8).start()
        length = 4 if how == "completed" else 200
        content = jsonl(*(request(n, max_tokens=length) for n in range(LINES)))
        window = 30_000 if how == "expired" else 86_400_000
        about = await b.create(content, window_ms=window)

        async def begun() -> bool:
            return (await b.state(about)).status == "in_progress"

        await wait_until(begun, timeout=10, what="it runs")
        await pass_time(at)
        with Away(b):
            if not taken:
                await b.workers[0].kill()
                await b.add_worker()
            if how == "cancelled":
                await b.batches.cancel(about.id)
            await pass_time(40)
            assert not (await b.state(about)).over
        batch = await b.over(about, 3_600)
        assert batch["status"] == how, batch
        output, errors = b.results(about, batch)
        assert sorted(output + errors) == ids(*range(LINES))


async def test_a_store_that_is_lost_holds_no_batch_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "GONE_MS", 60_000)
    async with world(monkeypatch, {"e1": engine(max_num_seqs=2)}) as w:
        b = await BatchWorld(w, ahead_lines=8).start(workers=2)
        made = [
            await b.create(
                jsonl(*(request(n, max_tokens=200) for n in range(LINES))), window_ms=60_000
            )
            for _ in range(2)
        ]
        await pass_time(5)
        assert {(await b.state(about)).status for about in made} == {"in_progress"}
        b.objects.clear()
        await b.batches.cancel(made[1].id)
        await pass_time(60)
        assert not any([(await b.state(about)).over for about in made])
        assert [(await b.over(about, 120))["status"] for about in made] == ["expired", "cancelled"]
