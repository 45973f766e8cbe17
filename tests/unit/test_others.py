"""Which other dispatchers serve which models."""

from dispatcher.others import KNOWN_S, Others


def test_others_are_seen_since_they_came_without_a_break() -> None:
    others = Others("me")
    for now, there in enumerate([{"me", "a"}, {"me", "a", "b"}, {"b"}, {"a", "b"}]):
        others.note(now, {"m": there, "other": {"c"}}, ["m"])
    assert others.of("m") == {"a": 3, "b": 1}
    assert others.of("other") == {}, "it is not served here"
    others.note(4, {}, ["m"])
    assert others.of("m") == {}


def test_a_model_is_known_once_it_was_announced_for_a_while() -> None:
    others = Others("me")
    others.note(0, {"m": {"a"}}, ["m"])
    assert not others.known(KNOWN_S, "m") and others.known(KNOWN_S + 0.1, "m")
    others.note(9, {}, ["m"])
    assert others.known(9, "m"), "also when nobody is left"
    others.forget("m")
    assert not others.known(9, "m") and others.of("m") == {}
