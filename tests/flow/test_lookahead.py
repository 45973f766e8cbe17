"""With `prefix_lookahead` a user's job goes first whose beginning the backend has, by the real
dispatcher."""

import pytest

from sim.settings import EngineSettings
from tests.flow.test_prefix import turn
from tests.flow.world import world

ENGINE = EngineSettings(
    model="m1", max_num_seqs=1, step_ms=50, per_seq_us=0.0, max_model_len=65_536
)
TALKS = ("b", "c", "d", "a", "e")


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("lookahead", "order"), [(0, "bcdae"), (1, "bcade"), (2, "bacde"), (8, "bacde")]
)
async def test_it_goes_before_so_many(
    monkeypatch: pytest.MonkeyPatch, lookahead: int, order: str
) -> None:
    """That of the conversation which the engine knows; the lane is known from its first `pop`."""
    model = {"prefix_lookahead": lookahead, "class": {"standard": {"queue_limit": 1}}}
    async with world(monkeypatch, {"e1": ENGINE}, model=model) as w:
        await w.answers(await w.ask("u", output=5, text=turn("a", 0)))
        running = [await w.ask("v", output=100, text="long") for _ in range(2)]
        asked = {talk: await w.ask("u", output=5, text=turn(talk, 1)) for talk in TALKS}
        await w.answers(*running, *asked.values())
        talks = {job.job: talk for talk, job in asked.items()}
        went = [r.headers.get("x-request-id", "") for r in w.engines["e1"].log]
        assert "".join(talks[job] for job in went if job in talks) == order
