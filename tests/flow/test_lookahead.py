"""With `prefix_lookahead` a user's job goes first whose beginning the backend has, by the real
dispatcher."""

import msgspec
import pytest

from common.settings import ModelSettings
from sim.settings import EngineSettings
from tests.flow.test_prefix import turn
from tests.flow.world import World, world
from tests.support.wait import pass_time

ENGINE = EngineSettings(
    model="m1", max_num_seqs=1, step_ms=50, per_seq_us=0.0, max_model_len=65_536
)
Fields = dict[str, object]
TALKS = ("b", "c", "d", "a", "e")


async def order_of(w: World) -> str:
    """In which the jobs of one user go, once those of another leave room."""
    await w.answers(await w.ask("u", output=5, text=turn("a", 0)))
    running = [await w.ask("v", output=100, text="long") for _ in range(2)]
    asked = {talk: await w.ask("u", output=5, text=turn(talk, 1)) for talk in TALKS}
    await w.answers(*running, *asked.values())
    talks = {job.job: talk for talk, job in asked.items()}
    went = [r.headers.get("x-request-id", "") for r in w.engines["e1"].log]
    return "".join(talks[job] for job in went if job in talks)


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
        assert await order_of(w) == order


@pytest.mark.looptime
@pytest.mark.parametrize(
    ("before", "after", "order"),
    [({}, {"prefix_lookahead": 2}, "bacde"), ({"prefix_lookahead": 2}, {}, "bcdae"),
     ({"prefix_lookahead": 2}, {"prefix_lookahead": 2, "prefix_affinity": False}, "bcdae")],
)  # fmt: skip
async def test_a_configuration_that_is_read_again_counts(
    monkeypatch: pytest.MonkeyPatch, before: Fields, after: Fields, order: str
) -> None:
    limits: Fields = {"class": {"standard": {"queue_limit": 1}}}
    async with world(monkeypatch, {"e1": ENGINE}, model={**before, **limits}) as w:
        await pass_time(2)
        backends = w.settings.models["m1"].backends
        model = msgspec.convert({**after, **limits, "backends": backends}, ModelSettings)
        for _, dispatcher in w.dispatchers:
            dispatcher.configure(msgspec.structs.replace(w.settings, models={"m1": model}))
        assert await order_of(w) == order
