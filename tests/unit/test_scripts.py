"""The loader: a header's slots become locals, and no argument can be miscounted."""

import hashlib
from importlib import resources

import pytest

from common.broker import Broker
from common.errors import BrokerRefused
from common.queue import Queue
from common.scripts import VERBS, Script, load, parse
from tests.support.wait import wait_until

SOURCE = """-- echo: give back what came.
--
-- KEYS record  hash   a key
-- KEYS others  hash*
-- ARGV now_ms  num
-- ARGV ratio   num
-- ARGV data    bytes
-- ARGV words   str*
-- RETURNS everything

return {record, others[1] or '', others[2] or '', string.format('%.0f', now_ms),
  string.format('%.0f', now_us), string.format('%.17g', ratio), data, #words, words[1] or ''}
"""


def slots(**changes: object) -> dict[str, object]:
    return {"record": "r", "others": [], "now_ms": 1, "ratio": 0.5, "data": b"", "words": []} | (
        changes
    )


def bind(script: Script, values: dict[str, object]) -> tuple[list[str], list[object]]:
    return script.bind(values)  # type: ignore[arg-type, return-value]


async def run(broker: Broker, source: str, values: dict[str, object]) -> object:
    broker.scripts["echo"] = parse("echo", source)
    return await broker.call("echo", **values)  # type: ignore[arg-type]


def test_slots_are_bound_in_the_order_of_the_header() -> None:
    script = parse("echo", SOURCE)
    values = slots(words=["x", "y"], data=b"\0\xff", others=["o1", "o2"], ratio=0.1)
    keys, args = bind(script, values)
    assert keys == ["r", "o1", "o2"]
    assert args == [1, 0.1, b"\0\xff", "x", "y"]
    assert bind(script, dict(reversed(values.items()))) == (keys, args)


@pytest.mark.parametrize(
    "values",
    [
        {k: v for k, v in slots().items() if k != "ratio"},
        slots(more=1),
        {k if k != "ratio" else "ration": v for k, v in slots().items()},
        {},
    ],
)
def test_other_slots_than_the_scripts_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(TypeError, match="echo"):
        bind(parse("echo", SOURCE), values)


@pytest.mark.parametrize(
    "source",
    [
        "-- KEYS a hash\n-- KEYS a hash\n",
        "-- KEYS a hash\n-- ARGV a str\n",
        "-- ARGV a str*\n-- ARGV b str\n",
        "-- KEYS a hash*\n-- KEYS b hash\n",
    ],
)
def test_a_header_that_cannot_be_bound_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="slot"):
        parse("bad", source)


def test_every_file_is_a_verb_and_every_verb_a_file() -> None:
    files = {f.name.removesuffix(".lua") for f in resources.files("common.lua").iterdir()
             if f.name.endswith(".lua")}  # fmt: skip
    scripts = load()
    assert files == set(VERBS) == set(scripts)
    for script in scripts.values():
        assert script.sha == hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()
        assert script.text.splitlines()[1].startswith(f"-- {script.name}:")


async def test_the_locals_are_there_in_the_script(broker: Broker) -> None:
    values = slots(others=["o1", "o2"], now_ms=1_790_000_000_123, data=b"\0\xff", words=["w", "v"])
    assert await run(broker, SOURCE, values) == [
        b"r", b"o1", b"o2", b"1790000000123", b"1790000000123000", b"0.5", b"\0\xff", 2, b"w",
    ]  # fmt: skip
    assert await run(broker, SOURCE, slots()) == [
        b"r", b"", b"", b"1", b"1000", b"0.5", b"", 0, b"",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [2, 999, 9_000])
async def test_the_rest_is_as_long_as_it_is(broker: Broker, count: int) -> None:
    """Lua unpacks no more than some 8,000 values at once."""
    words = [str(n) for n in range(count)]
    source = SOURCE.replace("\nreturn", "\ndo return words end\nlocal r =")
    reply = await run(broker, source, slots(words=words))
    assert reply == [word.encode() for word in words]


def test_of_a_library_come_the_functions_that_are_called() -> None:
    library = """-- own: words
local function inner() return 'inner' end
local function one() return 1 end
local function deep() return 1 end
"""
    library = library.replace(" end\n", "\nend\n")
    library = library.replace("deep() return", "deep() return inner() ..")
    source = SOURCE.replace("--\n", "-- USES own\n", 1) + "local x = deep()\n"
    head = parse("echo", source, {"own": library}).text.splitlines()[0]
    assert "function inner()" in head
    assert "function deep()" in head
    assert "one()" not in head
    gone = parse("echo", source.replace("deep()", "'deep'"), {"own": library}).text
    assert "function" not in gone, "nothing calls what calls it"


async def test_comments_and_strings_of_a_library(broker: Broker) -> None:
    """A comment behind code ends with its line, though all lines become one."""
    library = """-- own: words
local function said() -- in one's own words
  local at = '  -- '  -- no comment
  -- "a word
  return at .. "--\\"  '" .. 'it\\'s'
end
"""
    source = SOURCE.replace("--\n", "-- USES own\n", 1).replace(
        "return", "if true then return said() end\nreturn", 1
    )
    script = parse("echo", source, {"own": library})
    args = script.bind(slots())
    reply = await broker.command("EVAL", script.text, len(args[0]), *args[0], *args[1])
    assert reply == b"  -- --\"  'it's"


@pytest.mark.parametrize(
    "value",
    [0, -5, 1_790_000_000_000_123, 2**53, 1e21, 0.1 + 0.2, 1.0, 5e-324, 1.7e308, -0.0, 1 / 3],
)
async def test_numbers_come_through_exactly(broker: Broker, value: float) -> None:
    reply = await run(broker, SOURCE, slots(ratio=value))
    assert isinstance(reply, list)
    assert float(reply[5]) == value


@pytest.mark.parametrize("name", ["now_ms", "ratio"])
@pytest.mark.parametrize("bad", ["", "x", b"\xff", "1,5", "nil"])
async def test_a_number_that_is_none_ends_the_script(
    broker: Broker, name: str, bad: object
) -> None:
    source = SOURCE.replace("\nreturn", "\nredis.call('SET', record, 'written')\nreturn")
    with pytest.raises(BrokerRefused, match=name):
        await run(broker, source, slots(**{name: bad}))
    assert await broker.command("EXISTS", "r") == 0


async def test_an_error_names_the_line_of_the_file(broker: Broker) -> None:
    line = len(SOURCE.splitlines()) + 1
    with pytest.raises(BrokerRefused, match=rf":{line + 1}: planted"):
        await run(broker, SOURCE.replace("\nreturn", "\nlocal r =") + "error('planted')\n", slots())


async def test_no_time_given_means_the_servers(broker: Broker) -> None:
    def ms(reply: object) -> tuple[int, int]:
        assert isinstance(reply, list)
        return int(reply[3]), int(reply[4])

    before = await broker.now_ms()
    now_ms, now_us = ms(await run(broker, SOURCE, slots(now_ms=0)))
    after = await broker.now_ms()
    assert before <= now_ms <= after
    assert now_us // 1000 == now_ms


async def test_the_verbs_live_on_the_servers_clock(broker: Broker) -> None:
    queue = Queue(broker, "m")
    before = await broker.now_ms()
    led = await queue.lead("take", "d1")
    assert before <= led.term <= await broker.now_ms()
    assert (await queue.lead("take", "d2")).word == "held"
    short = await queue.lead("renew", "d1", term=led.term, lease_ms=1)
    assert short.word == "leader"

    async def taken() -> bool:
        return (await queue.lead("take", "d2")).word == "leader"

    await wait_until(taken, what="the end of a lease of one millisecond")
