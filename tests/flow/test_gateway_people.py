"""People that divide a key's share, requests that nobody waits for, and what a class weighs: from
HTTP headers and bodies to what is popped."""

import contextlib
import json
from collections import Counter
from typing import Any

import pytest

from common import keys
from common.key_settings import BackgroundRule, KeySettings
from common.settings import GatewaySettings, ModelSettings, Settings
from tests.support.asgi import Exchange, ask
from tests.support.gateway import MODEL, Run, Site, site
from tests.support.wait import pass_time, wait_until

CHAT = "/v1/chat/completions"
WEBUI = ("Authorization", "Bearer sk-test-webui")
TEAM = ("Authorization", "Bearer sk-test-team1")
ALICE = ("Authorization", "Bearer sk-test-alice")
TASK = "### Task:\nGenerate a concise title."
RULES = [
    BackgroundRule(header="X-Task: ^(title|tags)"),
    BackgroundRule(metadata="task"),
    BackgroundRule(system="^### Task:", to="batch"),
]
KEYS = [
    KeySettings(
        secret="sk-test-webui", user="webui", classes=["interactive", "standard"],
        user_from=["header:X-OpenWebUI-User-Id", "body:user"], jobs_max=4, background=RULES,
    ),
    KeySettings(
        secret="sk-test-team1", user="team", user_from=["body:user"], sub_users="separate"
    ),
    KeySettings(
        secret="sk-test-alice", user="alice", classes=["standard", "interactive", "batch"],
        weight=2.0,
    ),
]  # fmt: skip
KEYED = Settings(keys=KEYS)


def body(**fields: Any) -> bytes:
    sent = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return json.dumps(sent).encode()


def named(name: str) -> tuple[str, str]:
    return ("X-OpenWebUI-User-Id", name)


async def popped(s: Site, cls: str, *headers: tuple[str, str], **fields: Any) -> Run:
    """What becomes of one request, which is popped in this class."""
    async with Exchange(s.app, "POST", CHAT, body(**fields), headers) as e:
        run = await s.dispatcher.pop(cls)
        await run.answer(b"{}")
        assert (await e.until_over()).status == 200
    return run


async def users_popped(s: Site, n: int, cls: str = "standard") -> Counter[str]:
    """Whose the next jobs are, of sub-users their key's."""
    users = [(await s.dispatcher.pop(cls)).lease.user for _ in range(n)]
    return Counter(user.partition(":")[0] for user in users)


# --- people that divide a key's share


async def test_who_a_key_says_asks() -> None:
    async with site(KEYED) as s:
        cases: tuple[tuple[list[tuple[str, str]], dict[str, Any], str], ...] = (
            ([WEBUI, named("ann")], {"user": "bob"}, keys.path("webui", "ann")),
            ([WEBUI], {"user": "bob"}, keys.path("webui", "bob")),
            ([WEBUI, named(" "), ("X-User-Id", "ann")], {}, keys.path("webui", "-")),
            ([WEBUI, named("-")], {}, keys.path("webui", "--")),
            ([WEBUI, named("a:b}{*")], {}, keys.path("webui", "a:b}{*")),
            ([TEAM, named("ann")], {"user": "bob"}, keys.path("team/bob")),
            ([TEAM], {}, keys.path("team/-")),
            ([ALICE, named("ann")], {"user": "bob"}, keys.path("alice")),
        )
        for headers, fields, path in cases:
            cls = "interactive" if WEBUI in headers else "standard"
            run = await popped(s, cls, *headers, **fields)
            assert run.lease.user == path
        await s.at_rest()


async def test_a_name_that_is_too_long_is_refused() -> None:
    async with site(KEYED) as s:
        for headers, fields in (([WEBUI, named("x" * 257)], {}), ([TEAM], {"user": "é" * 129})):
            e = await ask(s.app, "POST", CHAT, body(**fields), headers=headers)
            assert e.status == 400 and e.json["error"]["param"] in ("x-openwebui-user-id", "user")
        assert not await s.broker.command("KEYS", "*lane*")
        await popped(s, "interactive", WEBUI, named("x" * 256))
        await popped(s, "standard", ALICE, named("x" * 257), user="x" * 10_000)


@pytest.mark.parametrize("key", [WEBUI, TEAM], ids=["share", "separate"])
async def test_what_forged_names_gain(key: tuple[str, str]) -> None:
    """Nothing where the share is divided: four names or none get as much as one other user."""
    alice = KeySettings(secret="sk-test-alice", user="alice")
    webui = KeySettings(secret="sk-test-webui", user="webui", user_from=["body:user"])
    settings = Settings(keys=[webui, KEYS[1], alice])
    async with site(settings) as s, contextlib.AsyncExitStack() as stack:
        for n in range(4):
            for headers, fields in (([key], {"user": f"forged{n}"}), ([ALICE], {})):
                sent = Exchange(s.app, "POST", CHAT, body(**fields), headers)
                await stack.enter_async_context(sent)
        await s.one_waits(8)
        got = await users_popped(s, 4)
        alone = got[keys.path("alice")]
        assert alone == (2 if key == WEBUI else 1)


async def test_leaving_the_name_out_gains_nothing() -> None:
    alice = KeySettings(secret="sk-test-alice", user="alice", classes=["interactive"])
    settings = Settings(keys=[KEYS[0], alice])
    async with site(settings) as s, contextlib.AsyncExitStack() as stack:
        for headers in ([WEBUI], [WEBUI, named("ann")], [ALICE], [ALICE]):
            sent = Exchange(s.app, "POST", CHAT, body(), headers)
            await stack.enter_async_context(sent)
            await stack.enter_async_context(Exchange(s.app, "POST", CHAT, body(), headers))
        await s.one_waits(8)
        users = [(await s.dispatcher.pop("interactive")).lease.user for _ in range(8)]
        got = Counter(user.partition(":")[0] for user in users[:4])
        assert got == {"webui": 2, "alice": 2}
        subs = [u for u in users if u.startswith("webui:")]
        assert len(set(subs[:2])) == 2, "who is named and who is not take turns"


async def test_a_full_key_and_a_full_person() -> None:
    settings = Settings(keys=KEYS, gateway=GatewaySettings(user_jobs_max=2))
    async with site(settings) as s, contextlib.AsyncExitStack() as stack:

        async def waits(name: str) -> bool:
            e = Exchange(s.app, "POST", CHAT, body(), [WEBUI, named(name)])
            before = await s.queued()
            await stack.enter_async_context(e)

            async def decided() -> bool:
                return e.over or await s.queued() > before

            await wait_until(decided, what="a place in the queue, or none")
            if e.over:
                assert e.status == 429 and 1 <= int(e.headers["retry-after"]) <= 60
                assert await s.queued() == before
            return not e.over

        assert [await waits(n) for n in ("a", "a", "a")] == [True, True, False]
        assert [await waits(n) for n in ("b", "c", "d")] == [True, True, False], "four a key"
        async with Exchange(s.app, "POST", CHAT, body(), [ALICE]):
            await s.one_waits(5)


@pytest.mark.looptime
async def test_a_person_that_leaves_and_one_that_is_told_its_place() -> None:
    async with site(KEYED) as s:
        async with (
            Exchange(s.app, "POST", CHAT, body(stream=True), [WEBUI, named("ann")]) as first,
            Exchange(s.app, "POST", CHAT, body(stream=True), [WEBUI, named("bob")]) as second,
        ):
            await s.one_waits(2)
            await first.until(b"position=")
            await second.until(b"position=")
            places = {e.body.split(b"position=")[1][:1] for e in (first, second)}
            assert places == {b"1", b"2"}
            first.leave()
            await s.one_waits(1)
            run = await s.dispatcher.pop("interactive")
            assert run.lease.user == keys.path("webui", "bob")
            second.leave()
            await pass_time(1)
            await run.end()
        await s.at_rest()


# --- requests that nobody waits for


async def test_background_requests_are_demoted() -> None:
    async with site(KEYED) as s:
        task = [{"role": "system", "content": TASK}, {"role": "user", "content": "hi"}]
        cases: tuple[tuple[tuple[str, str] | None, dict[str, Any]], ...] = (
            (("X-Task", "title"), {}),
            (None, {"metadata": {"task": "tags_generation"}}),
            (None, {"messages": task}),
            (None, {"messages": [task[0], {"role": "user", "content": "x" * 300_000}]}),
            (("X-Fairlane-Class", "interactive"), {"messages": task}),
            (None, {"messages": task, "service_tier": "priority"}),
        )
        for header, fields in cases:
            headers = [WEBUI, *([header] if header else [])]
            run = await popped(s, "batch", *headers, **fields)
            assert (run.lease.cls, run.lease.user) == ("batch", keys.path("webui", "-"))
            assert run.body == json.loads(body(**fields)), "passed on as it came"


async def test_other_requests_and_other_keys_stay_as_they_are() -> None:
    async with site(KEYED) as s:
        for fields in (
            {"metadata": {"tasks": "x"}},
            {"messages": [{"role": "system", "content": "Be brief. " + TASK}]},
            {"messages": [{"role": "system", "content": "x" * 5_000 + TASK}]},
            {"metadata": 3},
        ):
            await popped(s, "interactive", WEBUI, ("X-Task", "chat"), **fields)
        task = {"metadata": {"task": "x"}, "messages": [{"role": "system", "content": TASK}]}
        await popped(s, "standard", TEAM, ("X-Task", "title"), **task)
        await popped(s, "standard", ALICE, ("X-Task", "title"), **task)


async def test_a_batch_request_is_not_raised_by_a_rule() -> None:
    rules = [BackgroundRule(header="X-Task", to="standard")]
    key = KeySettings(secret="sk-test-alice", user="alice", classes=["batch"], background=rules)
    async with site(Settings(keys=[key])) as s:
        await popped(s, "batch", ALICE, ("X-Task", "title"))


# --- what a class weighs


@pytest.mark.parametrize(
    ("model", "weights"),
    [
        (ModelSettings(), (8.0, 2.0, 2.0)),
        (ModelSettings(interactive_weight=10), (20.0, 2.0, 2.0)),
        (ModelSettings(class_policy="strict"), (2.0, 2.0, 2.0)),
    ],
    ids=["weighted", "ten", "strict"],
)
async def test_what_a_class_weighs(model: ModelSettings, weights: tuple[float, ...]) -> None:
    async with site(Settings(keys=KEYS, models={MODEL: model})) as s:
        s.dispatcher.queue = s.gateway.desk.queues.of(MODEL)
        for cls, weight in zip(keys.CLASSES, weights, strict=True):
            run = await popped(s, cls, ALICE, ("X-Fairlane-Class", cls))
            assert (run.lease.cls, run.lease.weight) == (cls, weight)
