"""Requests that nobody waits for: told apart by what the key's rules name, and never raised."""

import itertools
import json
from typing import Any

import msgspec
import pytest

from common.intake.body import read_top
from common.key_settings import BackgroundRule
from common.keys import CLASSES
from common.setting_types import PriorityClass
from gateway.background import SEARCHED_BYTES, compiled, demoted
from gateway.people import Headers

TASK = "### Task:\nGenerate a concise, 3-5 word title with an emoji."


def top(**fields: Any) -> dict[str, msgspec.Raw]:
    return read_top(json.dumps({"model": "m", **fields}, ensure_ascii=False).encode())


def chat(*messages: tuple[str, Any]) -> dict[str, msgspec.Raw]:
    return top(messages=[{"role": role, "content": content} for role, content in messages])


def fits(rule: BackgroundRule, body: dict[str, msgspec.Raw], headers: Headers = ()) -> bool:
    return demoted("interactive", compiled([rule]), headers, body) == rule.to


@pytest.mark.parametrize(
    ("header", "sent", "expected"),
    [
        ("X-Task: ^title", [(b"x-task", b"title_generation")], True),
        ("X-Task:^title$", [(b"x-task", b"titles")], False),
        ("X-Task: b:c", [(b"x-task", b"ab:cd")], True),
        ("x-TASK", [(b"x-task", b"")], True),
        ("X-Task", [(b"x-tasks", b"title")], False),
        ("X-Task", [], False),
        ("X-Task: two", [(b"x-task", b"one"), (b"x-task", b"two")], True),
        ("X-Task: \xe4", [(b"x-task", b"\xe4")], True),
    ],
)
def test_by_a_header(header: str, sent: Headers, expected: bool) -> None:
    assert fits(BackgroundRule(header=header), top(), sent) is expected


@pytest.mark.parametrize(
    ("rule", "metadata", "expected"),
    [
        ("task=^title", {"task": "title_generation"}, True),
        ("task=tags", {"task": "title_generation"}, False),
        ("task=a=b", {"task": "a=b"}, True),
        ("task", {"task": ""}, True),
        ("task", {"tasks": "x"}, False),
        ("task", {"task": None}, False),
        ("task=1", {"task": 1}, False),
        ("task", "task", False),
        ("task", ["task"], False),
        ("task", None, False),
    ],
)
def test_by_metadata(rule: str, metadata: Any, expected: bool) -> None:
    assert fits(BackgroundRule(metadata=rule), top(metadata=metadata)) is expected


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([("system", TASK), ("user", "hi")], True),
        ([("developer", TASK), ("user", "hi")], True),
        ([("user", "hi"), ("system", TASK)], True),
        ([("user", "hi"), ("developer", TASK)], True),
        ([("system", [{"type": "text", "text": "You title."}, {"type": "text", "text": TASK}])],
         True),
        ([("system", [{"type": "image_url", "image_url": {"url": TASK}}])], False),
        ([("system", "Be brief."), ("system", TASK)], False),
        ([("system", "Be brief."), ("user", TASK)], False),
        ([("user", TASK)], True),
        ([("user", "hi"), ("user", TASK)], False),
        ([("system", None), ("user", TASK)], False),
        ([("system", ""), ("user", TASK)], False),
        ([("system", {"text": TASK})], False),
        ([("system", 3)], False),
        ([], False),
    ],
)  # fmt: skip
def test_by_the_first_system_message(messages: Any, expected: bool) -> None:
    rule = BackgroundRule(system=r"^(You title\.\n)?### Task:")
    assert fits(rule, chat(*messages)) is expected


@pytest.mark.parametrize(
    "raw", [b'"x"', b"{}", b'["x"]', b"[3]", b'[{"role":3}]', b"null", b"[{}]"]
)
def test_messages_that_are_none_fit_nothing(raw: bytes) -> None:
    body = read_top(b'{"model":"m","messages":' + raw + b"}")
    assert not fits(BackgroundRule(system="."), body)


def test_a_path_without_messages_has_no_system_message() -> None:
    assert not fits(BackgroundRule(system="."), top(prompt=TASK))


def test_only_the_beginning_is_searched() -> None:
    rule = BackgroundRule(system="needle")
    assert fits(rule, chat(("system", "x" * (SEARCHED_BYTES - 6) + "needle")))
    assert not fits(rule, chat(("system", "x" * (SEARCHED_BYTES - 5) + "needle")))
    assert not fits(rule, chat(("system", "é" * SEARCHED_BYTES + "needle")))
    many = [{"type": "text", "text": "x" * 1_000}] * 5 + [{"type": "text", "text": "needle"}]
    assert not fits(rule, chat(("system", many)))


def test_a_request_is_lowered_and_never_raised() -> None:
    classes: list[PriorityClass] = ["interactive", "standard", "batch"]
    for cls, to in itertools.product(classes, classes):
        rules = compiled([BackgroundRule(header="X-Task", to=to)])
        got = demoted(cls, rules, [(b"x-task", b"")], {})
        assert got == max(cls, to, key=CLASSES.index)
        assert demoted(cls, rules, [], {}) == cls


def test_of_several_rules_the_lowest_that_fits_counts() -> None:
    rules = compiled(
        [
            BackgroundRule(header="X-A", to="batch"),
            BackgroundRule(metadata="a", to="standard"),
            BackgroundRule(system="a", to="batch"),
        ]
    )
    body = top(metadata={"a": "1"}, messages=[{"role": "system", "content": "b"}])
    assert demoted("interactive", rules, [], body) == "standard"
    assert demoted("interactive", rules, [(b"x-a", b"")], body) == "batch"
    assert demoted("batch", rules, [(b"x-a", b"")], body) == "batch"
    assert demoted("interactive", (), [(b"x-a", b"")], body) == "interactive"


def test_of_a_response_its_instructions_are_searched() -> None:
    rules = compiled([BackgroundRule(system="^### Task:")])
    for text, cls in (("### Task: a title", "batch"), ("Be kind.", "standard")):
        top = read_top(json.dumps({"model": "m", "input": "x", "instructions": text}).encode())
        assert demoted("standard", rules, [], top) == cls
    assert demoted("standard", rules, [], read_top(b'{"input":"### Task:"}')) == "standard"
