"""Which of a key's people asks, and that nobody gains by saying so wrongly."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common import keys
from common.intake.answers import Refusal
from common.key_settings import KeySettings
from gateway.people import NAME_BYTES_MAX, NOBODY, Headers, People, Who, people


def of(*user_from: str, separate: bool = False) -> People:
    key = KeySettings(
        secret="sk-webui-1", user="webui", user_from=list(user_from),
        sub_users="separate" if separate else "share",
    )  # fmt: skip
    return people(key)


HEADER = of("header:X-User-Id")
BODY = of("body:user")
BOTH = of("header:X-User-Id", "body:user", "header:X-Other")
ID = b"x-user-id"


@pytest.mark.parametrize(
    ("key", "headers", "body_user", "sub"),
    [
        (HEADER, [(ID, b"ann")], None, "ann"),
        (HEADER, [(ID, b"  ann ")], None, "ann"),
        (HEADER, [(ID, "änn".encode())], None, "änn"),
        (HEADER, [(ID, b"\xe4nn")], None, "änn"),
        (HEADER, [(b"x-other", b"ann"), (b"x-fairlane-user", b"ann")], "ann", NOBODY),
        (HEADER, [], None, NOBODY),
        (HEADER, [(ID, b"")], None, NOBODY),
        (HEADER, [(ID, b" \t ")], None, NOBODY),
        (BODY, [(ID, b"bob")], "ann", "ann"),
        (BODY, [], " ann ", "ann"),
        (BODY, [], "a:b}{\r\n\0", "a:b}{\r\n\0"),
        (BODY, [], None, NOBODY),
        (BOTH, [(ID, b"ann"), (b"x-other", b"cy")], "bob", "ann"),
        (BOTH, [(b"x-other", b"cy")], "bob", "bob"),
        (BOTH, [(b"x-other", b"cy"), (ID, b"")], "", "cy"),
    ],
)
def test_the_first_source_that_is_present(
    key: People, headers: Headers, body_user: str | None, sub: str
) -> None:
    assert key.who(headers, body_user) == Who("webui", sub)


def test_a_key_that_does_not_ask_for_it_is_one_user() -> None:
    assert of().who([(ID, b"ann")], "bob") == Who("webui")


def test_people_of_their_own() -> None:
    key = of("header:X-User-Id", separate=True)
    assert key.who([(ID, b"ann")], None) == Who("webui/ann")
    assert key.who([], None) == Who(f"webui/{NOBODY}")


@pytest.mark.parametrize("name", [NOBODY, "--", "---------"])
def test_no_name_is_that_of_nobody(name: str) -> None:
    assert BODY.who([], name).sub != NOBODY
    assert BODY.who([], name) != BODY.who([], name + NOBODY)


@given(st.lists(st.text(max_size=40) | st.text("-", max_size=5), min_size=2, max_size=2))
def test_people_differ_where_their_names_do(names: list[str]) -> None:
    """As the queue sees them: by the path. Spaces around a name are none of it."""
    given = [n.strip() for n in names]
    whos = [BODY.who([], n) for n in given]
    paths = [keys.path(w.user, w.sub) for w in whos]
    assert (paths[0] == paths[1]) == (given[0] == given[1])
    nobody = BODY.who([], None)
    for name, path in zip(given, paths, strict=True):
        assert (path == keys.path(nobody.user, nobody.sub)) == (not name)
        assert path.startswith(keys.encode("webui") + ":"), "all are within the key's share"


@pytest.mark.parametrize("name", ["x" * NAME_BYTES_MAX, "é" * (NAME_BYTES_MAX // 2)])
def test_the_longest_name(name: str) -> None:
    assert BODY.who([], name).sub == name
    assert HEADER.who([(ID, name.encode())], None).sub == name
    for longer in (name + "x", name * 1_000):
        with pytest.raises(Refusal) as body:
            BODY.who([], longer)
        with pytest.raises(Refusal) as header:
            HEADER.who([(ID, longer.encode())], None)
        assert body.value.answer.status == header.value.answer.status == 400
        assert (body.value.answer.param, header.value.answer.param) == ("user", "x-user-id")
        assert longer not in body.value.answer.message


def test_a_long_name_that_is_not_looked_at_is_no_matter() -> None:
    assert HEADER.who([(ID, b"ann")], "x" * 10_000).sub == "ann"
    assert BOTH.who([(ID, b"ann")], "x" * 10_000).sub == "ann"


def test_a_header_that_is_there_twice_says_nothing() -> None:
    for other in (b"bob", b"ann"):
        with pytest.raises(Refusal) as caught:
            HEADER.who([(ID, b"ann"), (ID, other)], None)
        assert caught.value.answer.status == 400
        assert caught.value.answer.param == "x-user-id"
    twice = [(b"x-unknown", b"a"), (b"x-unknown", b"b"), (ID, b"ann")]
    assert HEADER.who(twice, None).sub == "ann"
