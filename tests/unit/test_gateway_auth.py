"""Who asks, and which class they get."""

import hashlib
import itertools

import pytest

from common.intake.answers import Refusal
from common.key_settings import BackgroundRule, KeySettings
from common.keys import CLASSES
from gateway.auth import Keys, Principal, choose_class, open_user

ALICE = KeySettings(secret="sk-test-alice", user="alice", weight=2.0, models=["m1"], comments=False)
BOB = KeySettings(
    sha256=hashlib.sha256("sk-tést-bob".encode()).hexdigest().upper(), user="bob",
    classes=["batch", "standard"],
)  # fmt: skip
KEYS = Keys([ALICE, BOB])


def principal(*classes: str) -> Principal:
    return Principal("u", 1.0, classes, frozenset(), True)


@pytest.mark.parametrize("header", [b"Bearer sk-test-alice", b"bearer sk-test-alice",
                                    b"BEARER  sk-test-alice "])  # fmt: skip
def test_a_known_key(header: bytes) -> None:
    found = KEYS.principal(header)
    assert (found.user, found.weight, found.comments) == ("alice", 2.0, False)
    assert found.may_use("m1") and found.may_use("alias", "m1") and not found.may_use("m2")


def test_a_key_of_which_only_the_digest_is_known() -> None:
    found = KEYS.principal("Bearer sk-tést-bob".encode())
    assert found.user == "bob" and found.may_use("anything")


@pytest.mark.parametrize(
    "header",
    [None, b"", b"Bearer", b"Bearer ", b"Basic x", b"sk-test-alice", b"Bearer \xff\xfe",
     b"Bearer " + b"x" * 8192, b"Bearer sk-test-alice x", b"Bearersk-test-alice",
     b"Bearer sk-test-alic", b"Basic sk-test-alice"],
)  # fmt: skip
def test_every_other_key_gets_the_same_answer(header: bytes | None) -> None:
    with pytest.raises(Refusal) as caught:
        KEYS.principal(header)
    answer = caught.value.answer
    assert answer.status == 401 and answer.code == "invalid_api_key"
    with pytest.raises(Refusal) as other:
        KEYS.principal(b"Bearer nobody")
    assert other.value.answer.body() == answer.body()
    assert b"nobody" not in answer.body()


def test_a_key_carries_how_its_people_are_told_apart() -> None:
    webui = KeySettings(
        secret="sk-test-webui", user="webui", user_from=["header:X-User", "body:user"], jobs_max=7,
        background=[BackgroundRule(header="X-Task: title")],
    )  # fmt: skip
    found = Keys([ALICE, webui]).principal(b"Bearer sk-test-webui")
    assert found.people is not None
    assert found.people.sources == (b"x-user", b"") and not found.people.separate
    assert found.key_jobs == 7
    assert [rule.header for rule in found.background] == [b"x-task"]
    alice = KEYS.principal(b"Bearer sk-test-alice")
    assert alice.people is not None and alice.people.sources == () and alice.background == ()
    assert Keys([]).principal(None).people is None


def test_without_keys_anyone_may_use_everything() -> None:
    keys = Keys([])
    for header in (None, b"Bearer x", b"garbage\xff"):
        found = keys.principal(header)
        assert found.user == "" and set(found.classes) == set(CLASSES)
        assert choose_class(found, None, None) == "standard"


def test_whom_an_open_request_counts_for() -> None:
    assert open_user("ann", b"Bearer t", "10.0.0.1") == "ann"
    token = open_user(None, b"Bearer secret-token", "10.0.0.1")
    assert token.startswith("k-") and "secret" not in token
    assert token == open_user(None, b"bearer secret-token", "10.0.0.2")
    assert token != open_user(None, b"Bearer other-token", "10.0.0.1")
    for header in (None, b"Bearer ", b"Basic x"):
        assert open_user(None, header, "10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(
    ("header", "tier", "expected"),
    [
        (None, None, "standard"), (None, "auto", "standard"), (None, "scale", "standard"),
        (None, "priority", "interactive"), (None, "default", "standard"), (None, "flex", "batch"),
        (b"batch", "priority", "batch"), (b" Interactive ", None, "interactive"),
    ],
)  # fmt: skip
def test_the_class_asked_for(header: bytes | None, tier: str | None, expected: str) -> None:
    assert choose_class(principal("standard", "interactive", "batch"), header, tier) == expected


def test_a_class_the_key_may_not_use() -> None:
    for n in (1, 2, 3):
        for may in itertools.permutations(CLASSES, n):
            for asked in CLASSES:
                got = choose_class(principal(*may), asked.encode(), None)
                lower = [c for c in CLASSES[CLASSES.index(asked) :] if c in may]
                highest = next(c for c in CLASSES if c in may)
                assert got == (lower[0] if lower else highest)


@pytest.mark.parametrize("header", [b"", b"urgent", b"\xff", b"interactive,batch"])
def test_an_unknown_class_names_the_known_ones(header: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        choose_class(principal(*CLASSES), header, None)
    answer = caught.value.answer
    assert answer.status == 400 and answer.param == "X-Fairlane-Class"
    assert all(c in answer.message for c in CLASSES)
