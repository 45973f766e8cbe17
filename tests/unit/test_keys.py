"""Keys: nobody's name reaches into another's, and the list of those that may stay is whole."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import keys
from common.broker import Broker
from common.keys import CLASSES, ModelKeys, encode
from tests.conftest import leaked_keys

NASTY = ["a", "a:b", "a}", "{a", "{}", "a\r\nb", "*", "模型", "x" * 10_000, "..", "\0", "", "_",
         "_61", "_h" + "0" * 64, "A", "a ", "é", "e\u0301", "\ud800", "x" * 64, "x" * 65,
         "/" * 32, "/" * 33, "/" * 64, "/" * 65]  # fmt: skip
names = st.one_of(st.sampled_from(NASTY), st.text(max_size=80), st.text("a:{}_.-", max_size=6))
jobs = st.from_regex(r"[0-9a-f]{32}", fullmatch=True)
HARMLESS = re.compile(r"[A-Za-z0-9.:{}_-]+")


def every_key(model: str, cls: str, user: str, job: str) -> list[str]:
    k = ModelKeys(model)
    side = k.classes[cls]
    return [
        k.lane(cls, encode(user)), k.record(job), k.body(job), k.owned("g1-host-ab12"),
        side.backlog, side.counter, k.board, k.waiting, k.deadlines, k.running, k.inflight, k.ewma,
        k.bell,
    ]  # fmt: skip


@given(names, st.sampled_from(CLASSES), names, jobs)
def test_keys_are_short_harmless_and_of_one_slot(model: str, cls: str, user: str, job: str) -> None:
    found = every_key(model, cls, user, job)
    assert len(set(found)) == len(found)
    for key in found:
        assert len(key.encode()) < 200
        assert HARMLESS.fullmatch(key)
        assert key.count("{") == key.count("}") == 1
        assert key[key.index("{") : key.index("}") + 1] == f"{{{encode(model)}}}"


def parts(t: tuple[str, str, str, str]) -> set[str]:
    """The keys that hold what is this user's or this job's alone."""
    model, cls, user, job = t
    k = ModelKeys(model)
    return {k.lane(cls, encode(user)), k.record(job) + encode(user) + cls}


@given(
    st.lists(
        st.tuples(names, st.sampled_from(CLASSES), names, jobs), min_size=2, max_size=6, unique=True
    )
)
def test_distinct_tuples_have_distinct_keys(tuples: list[tuple[str, str, str, str]]) -> None:
    for a, b in itertools.combinations(tuples, 2):
        (model, cls, user, job), (other, cls2, user2, job2) = a, b
        one, two = ModelKeys(model), ModelKeys(other)
        same_lane = one.lane(cls, encode(user)) == two.lane(cls2, encode(user2))
        assert same_lane == ((model, cls, user) == (other, cls2, user2))
        assert (one.record(job) == two.record(job2)) == ((model, job) == (other, job2))
        assert (one.body(job) == two.body(job2)) == ((model, job) == (other, job2))
        if model != other:
            assert not set(every_key(*a)) & set(every_key(*b))


def test_every_pair_of_nasty_names_differs() -> None:
    encoded = [encode(n) for n in NASTY]
    assert len(set(encoded)) == len(NASTY)
    lanes = [
        ModelKeys(model).lane(cls, encode(user))
        for model in NASTY
        for user in NASTY
        for cls in CLASSES
    ]
    assert len(set(lanes)) == len(lanes)
    assert max(len(lane) for lane in lanes) < 200


@given(names)
def test_a_name_is_kept_where_it_is_harmless(name: str) -> None:
    encoded = encode(name)
    kept = re.fullmatch(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,63}", name, re.A) is not None
    assert (encoded == name) == kept
    assert len(encoded) <= 66
    if kept:
        assert encode(encoded) == encoded


@pytest.mark.parametrize(
    ("name", "encoded"),
    [
        ("Qwen2.5-7B_Instruct", "Qwen2.5-7B_Instruct"),
        ("meta-llama/Llama-3", "_6d6574612d6c6c616d612f4c6c616d612d33"),
        ("_x", "_5f78"),
        ("", "_"),
        ("x" * 65, "_h9537c5fdf120482f7d58d25e9ed583f52c02b4e304ea814db1633ad565aed7e9"),
    ],
)
def test_encoded_names_stay_the_same_between_versions(name: str, encoded: str) -> None:
    assert encode(name) == encoded


def test_permanent_keys_hold_no_job() -> None:
    k = ModelKeys("m")
    own = {k.record("j"), k.body("j"), k.lane("batch", "u"), k.deadlines, k.running, k.inflight,
           k.waiting, k.owned("g")}  # fmt: skip
    backlogs = {c.backlog for c in k.classes.values()}
    assert [key for key in own | backlogs if k.permanent(key)] == []
    stays = {keys.GATEWAYS, keys.MODELS, k.board, k.ewma}
    assert [key for key in stays | set(k.order("batch", "k:s")[-1:]) if not k.permanent(key)] == []


def test_channels_are_not_keys_of_a_model() -> None:
    assert keys.reply("g1") == "fl:reply:g1"
    assert keys.control("d1") == "fl:control:d1"


async def test_keys_that_would_stay_for_ever_are_found(broker: Broker) -> None:
    """The check that every test with a broker ends with."""
    k = ModelKeys("model/with:signs")
    for key in (k.board, k.ewma, *k.order("batch", "k:s")[-1:], keys.GATEWAYS):
        await broker.command("SET", key, 1)
    await broker.command("SET", k.record("expires"), 1, "PX", 9_000)
    assert await leaked_keys(broker) == []
    await broker.command("SET", k.record("stays"), 1)
    await broker.command("SET", k.waiting, 1)
    assert await leaked_keys(broker) == sorted([k.record("stays"), k.waiting])
    await broker.command("DEL", k.record("stays"), k.waiting)
