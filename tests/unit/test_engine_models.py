"""The names on an engine's list of models."""

import msgspec
import pytest

from dispatcher.engines.models import MODELS_MAX, NAME_MAX, read_models


def page(*names: object) -> bytes:
    return msgspec.json.encode({"data": [{"id": name} for name in names]})


def test_each_name_once_and_in_order() -> None:
    assert read_models(page("b", "a", "b", "")) == ("b", "a")
    assert read_models(page()) == ()


def test_names_are_few_and_short() -> None:
    """All who are told of models are told all of them, all the time."""
    many = read_models(page(*(f"m{n}" for n in range(MODELS_MAX + 5))))
    assert many is not None and len(many) == MODELS_MAX and many[0] == "m0"
    longest = "é" * NAME_MAX
    assert read_models(page(longest + "x", "ok", longest)) == ("ok", longest)


@pytest.mark.parametrize("rubbish", [b"", b"[]", b'{"data": 1}', page(1), b'{"data": [' * 2_000])
def test_what_is_no_such_list(rubbish: bytes) -> None:
    assert read_models(rubbish) is None
