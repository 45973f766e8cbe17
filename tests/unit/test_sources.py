"""What is wanted of the sources, what changes by it, and names that are looked up."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.settings import BackendSettings
from dispatcher.sources.names import ABSENT_MAX, ADDRESSES_MAX, NAMES_MAX, Addresses, Names
from dispatcher.sources.wanted import BACKENDS_MAX, Listed, Wanted, diff, endpoint, merge
from tests.support.wait import pass_time

URL, NAME = "http://gpu1:8000", "http://gpu.svc:8000"


def backend(url: str = URL, *models: str, **more: object) -> BackendSettings:
    return BackendSettings(url=url, models=models, **more)  # type: ignore[arg-type]


def only(wanted: dict[str, Wanted]) -> Wanted:
    (one,) = wanted.values()
    return one


# --- the difference

KEYS = st.lists(st.integers(0, 8), unique=True)


@given(KEYS, st.dictionaries(st.integers(0, 8), st.booleans()))
def test_what_changes_leads_from_what_is_to_what_is_wanted(
    wanted: list[int], present: dict[int, bool]
) -> None:
    change = diff(wanted, present)
    after = dict(present)
    after |= dict.fromkeys(change.start, False)
    after |= dict.fromkeys(change.resume, False)
    after |= dict.fromkeys(change.leave, True)
    assert {k for k, leaving in after.items() if not leaving} == set(wanted)
    assert not set(change.start) & present.keys(), "what is there is not begun again"
    assert all(present[k] for k in change.resume)
    assert not any(present[k] for k in change.leave), "what leaves is told so once"
    nothing = diff(wanted, after)
    assert not (nothing.start or nothing.resume or nothing.leave)


# --- all sources together


def test_a_backend_in_several_places_is_one() -> None:
    """The first counts, and the models of all."""
    first = backend(URL, max_num_seqs=8)
    wanted = merge(
        [Listed(first, "config", "m1"), Listed(backend(URL + "/", "m2"), "file"),
         Listed(backend(URL), "admin")],
        {}, (),
    )  # fmt: skip
    one = only(wanted)
    assert (one.settings, one.source, one.name, one.host) == (first, "config", URL, None)
    assert one.models["m1"].max_num_seqs == 8
    assert set(one.models) == {"m1", "m2"}
    assert one.discover, "the last names no models, so what it lists is served too"


@pytest.mark.parametrize(
    ("entry", "models", "discover"),
    [
        (Listed(backend(), "config"), set(), True),
        (Listed(backend(), "config", "m1"), {"m1"}, False),
        (Listed(backend(URL, "m1", "lora"), "admin"), {"m1", "lora"}, False),
    ],
)
def test_which_models_a_backend_serves(entry: Listed, models: set[str], discover: bool) -> None:
    one = only(merge([entry], {}, ()))
    assert set(one.models) == models and one.discover is discover


def test_a_name_is_as_many_backends_as_it_has_addresses() -> None:
    entry = Listed(backend("https://gpu.svc", resolve=True, api_key="sk"), "config", "m1")
    assert merge([entry], {}, ()) == {}
    wanted = merge([entry], {("gpu.svc", 443): ("10.0.0.1", "fd00::2")}, ())
    assert list(wanted) == ["https://10.0.0.1:443", "https://[fd00::2]:443"]
    for one in wanted.values():
        assert one.host == "gpu.svc" and one.name == "https://gpu.svc"
        assert one.settings.api_key == "sk" and not one.settings.resolve
        assert set(one.models) == {"m1"}


@pytest.mark.parametrize(
    ("drained", "states"),
    [
        ({NAME}, [True, True]), ({"http://10.0.0.2:8000"}, [False, True]),
        ({"http://other"}, [False, False]),
    ],
)  # fmt: skip
def test_a_backend_is_drained_by_its_address_or_by_its_name(
    drained: set[str], states: list[bool]
) -> None:
    entry = Listed(backend(NAME, resolve=True), "config")
    wanted = merge([entry], {("gpu.svc", 8000): ("10.0.0.1", "10.0.0.2")}, drained)
    assert [w.drained for w in wanted.values()] == states


def test_there_is_a_most_of_backends() -> None:
    many = [Listed(backend(f"http://gpu{n}"), "file") for n in range(BACKENDS_MAX + 5)]
    wanted = merge([*many, Listed(backend("http://gpu0", "m9"), "admin")], {}, ())
    assert len(wanted) == BACKENDS_MAX
    assert "m9" in wanted["http://gpu0"].models, "more of one that is there is heard"


@pytest.mark.parametrize(
    ("url", "found"),
    [("http://a", ("a", 80)), ("https://a", ("a", 443)), ("http://[::1]:8", ("::1", 8))],
)
def test_endpoint(url: str, found: tuple[str, int]) -> None:
    assert endpoint(url) == found


# --- names


def test_addresses_stay_until_several_answers_came_without_them() -> None:
    a = Addresses()
    assert a.told(["1", "2"]) and a.known == ("1", "2")
    for _ in range(ABSENT_MAX - 1):
        assert not a.told(["2"])
    assert not a.told(["1", "2"]), "it came again"
    for _ in range(ABSENT_MAX - 1):
        assert not a.told(["2"])
    assert a.told(["2"]) and a.known == ("2",)
    for _ in range(ABSENT_MAX):
        assert not a.told([]) and a.known == ("2",), "no answer is no news"
    a.told([str(n) for n in range(10 * ADDRESSES_MAX)])
    assert len(a.known) == ADDRESSES_MAX and "2" in a.known


class Dns:
    """A resolver whose answers the test sets; None hangs."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str] | OSError | None] = {}
        self.asked: list[tuple[float, str]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((asyncio.get_running_loop().time(), host))
        answer = self.answers[host]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, OSError):
            raise answer
        return answer or []


@pytest.mark.looptime
async def test_names_are_looked_up_at_once_and_again_and_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dns, changes = Dns(), 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    names = Names(dns, 10.0, changed)
    running = asyncio.ensure_future(names.run())
    await pass_time(1)
    dns.answers |= {"a": ["1"], "b": OSError("no"), "c": None}
    names.want({("a", 80), ("b", 80), ("c", 80)})
    await pass_time(1)
    assert names.known() == {("a", 80): ("1",), ("b", 80): (), ("c", 80): ()}, "c holds up nobody"
    assert changes == 1
    await pass_time(60)
    times = [at for at, host in dns.asked if host == "a"]
    assert times[0] == pytest.approx(1) and 4 <= len(times) <= 8
    assert changes == 1
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert 2 <= sum("look up b" in text for text in warned) + sum(
        "look up c" in text for text in warned
    ) <= 4, "once a minute each"  # fmt: skip
    dns.answers["a"] = OSError("no")
    await pass_time(120)
    assert names.known()["a", 80] == ("1",), "what was known stays"
    dns.answers |= {f"n{n}": ["1"] for n in range(2 * NAMES_MAX)}
    names.want({(f"n{n}", 80) for n in range(2 * NAMES_MAX)})
    assert len(names.known()) == NAMES_MAX
    names.want(())
    assert names.known() == {}
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
