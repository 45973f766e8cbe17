"""Which models a gateway knows."""

import pytest

from common.broker import Broker
from common.intake.models import FORGOTTEN_S, STALE_MS, Models, merge
from common.settings import ModelSettings
from common.wire import VERSION, Announcement, ServedModel, encode_announcement
from tests.support.wait import pass_time

NOW = 1_000_000


def said(*models: ServedModel, at_ms: int = NOW) -> bytes:
    return encode_announcement(Announcement(VERSION, at_ms, list(models)))


def served(name: str, *aliases: str, ready: bool = True, created: int = 5, drain: float = 1.0
           ) -> ServedModel:  # fmt: skip
    return ServedModel(name, list(aliases), ready, created, drain)


def test_announcements_of_all_dispatchers_are_joined() -> None:
    models = merge(
        {
            b"d1": said(served("m1", "a"), served("m2", ready=False)),
            b"d2": said(served("m1", "b", ready=False, created=3, drain=4.0)),
        },
        NOW,
        {},
    )
    assert models["m1"] == ServedModel("m1", ["a", "b"], True, 3, 4.0)
    assert not models["m2"].ready


def test_a_model_has_as_many_backends_as_the_dispatcher_that_knows_most() -> None:
    two = ServedModel("m1", [], True, 5, 1.0, 2)
    for first, second in ((two, served("m1")), (served("m1"), two)):
        assert merge({b"d1": said(first), b"d2": said(second)}, NOW, {})["m1"].backends == 2


def test_why_a_class_waits_is_what_the_leader_says() -> None:
    leader = ServedModel("m1", [], True, 5, 1.0, 1, {"batch": "KV 0.95 ≥ 0.92"})
    both = {b"d1": said(served("m1")), b"d2": said(leader)}
    assert merge(both, NOW, {})["m1"].closed == {"batch": "KV 0.95 ≥ 0.92"}


@pytest.mark.parametrize(("age", "known"), [(0, True), (STALE_MS, True), (STALE_MS + 1, False)])
def test_old_announcements_do_not_count(age: int, known: bool) -> None:
    assert ("m1" in merge({b"d1": said(served("m1"), at_ms=NOW - age)}, NOW, {})) is known


def test_configured_models_are_known_before_anybody_serves_them() -> None:
    settings = {"m1": ModelSettings(aliases=["a"])}
    assert merge({}, NOW, settings)["m1"] == ServedModel("m1", ["a"], False, 0, 0.0)
    joined = merge({b"d": said(served("m1", "b"))}, NOW, settings)["m1"]
    assert joined.ready and joined.aliases == ["a", "b"] and joined.created == 5


def test_what_another_version_says_is_left_out() -> None:
    fields = {b"d1": b"\x93\x02\x00\x90", b"d2": b"junk", b"\xff": said(served("m1"))}
    assert list(merge(fields, NOW, {})) == ["m1"]


class _Broker(Broker):
    """Says what the test has dispatchers say."""

    def __init__(self) -> None:
        self.said: list[ServedModel] = []

    async def command(self, *_: object) -> list[bytes]:  # type: ignore[override]
        return [b"d1", said(*self.said)]

    async def now_ms(self) -> int:
        return NOW


@pytest.mark.looptime
async def test_a_model_that_nobody_serves_is_known_for_a_day() -> None:
    broker = _Broker()
    models = Models(broker, {"c": ModelSettings()})

    async def look(*now: str) -> set[str]:
        broker.said = [served(name) for name in now]
        await models.refresh()
        return {name for name, _ in models.listing()}

    assert await look("a", "b") == {"a", "b", "c"}
    assert await look("b") == {"a", "b", "c"}
    assert models.resolve("a") and not models.accepts(models.resolve("a"))  # type: ignore[arg-type]
    await pass_time(FORGOTTEN_S - 1)
    assert await look() == {"a", "b", "c"}
    await pass_time(1)
    assert await look() == {"b", "c"}, "what is in the configuration stays"
    assert await look("b") == {"b", "c"}
    await pass_time(FORGOTTEN_S)
    assert await look() == {"b", "c"}, "counted from when it went the last time"
