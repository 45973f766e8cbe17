"""Settings: where they come from, which wins, what is refused and in which words."""

from pathlib import Path
from typing import Any

import pytest

from common.config import load
from common.errors import ConfigError
from common.key_settings import KeySettings
from common.settings import BackendSettings, ClassSettings, ModelSettings, Price, TokenWeights

GPU = "http://gpu1:8000"
KEY = '[[keys]]\nsecret = "12345678"\nuser = "u"\n'
BACKEND = '[[backends]]\nurl = "http://h:1"\n'
FULL = """
[redis]
url = "redis://r:1/0"
[gateway]
port = 8001
wait_batch_s = 3600
cors_origins = ["https://a.example"]
[dispatcher]
metrics_port = 9090
[[keys]]
secret = "sk-alice-1"
user = "alice"
weight = 2
classes = ["interactive", "standard"]
[models."llama-3.1-8b"]
aliases = ["gpt-4o-mini"]
backends = [{ url = "http://gpu1:8000", engine = "vllm", max_num_seqs = 256 }]
[models."llama-3.1-8b".class.batch]
queue_limit = 2
wait_s = 60
inflight_max = 40
user_inflight_max = 8
jobs_max = 500
[models.big]
fairness = "price"
price = { input = 0.5, cached_input = 0.05, output = 1.5 }
class_policy = "strict"
interactive_weight = 2
floor_share = 0
slots = 64
reserved_slots = 3
engine_priority = true
[models.other]
tokens = { input = 1, cached = 0, output = 3 }
[[keys]]
secret = "sk-webui-1"
user = "webui"
user_from = ["header:X-OpenWebUI-User-Id", "body:user"]
jobs_max = 300
background = [
    { header = "X-Task: ^title$" },
    { metadata = "task" },
    { system = "### Task:", to = "standard" },
]
[[keys]]
secret = "sk-team-01"
user = "team"
user_from = ["body:user"]
sub_users = "separate"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "fairlane.toml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str, **more: Any) -> str:
    """Why a file is refused: one line that an operator can act on."""
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text), environment={}, **more)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_without_anything_there_are_defaults() -> None:
    settings = load(environment={})
    assert settings.redis.url is None
    assert (settings.gateway.host, settings.gateway.port) == ("127.0.0.1", 8000)
    assert (settings.gateway.wait_s("interactive"), settings.gateway.wait_s("batch")) == (
        110,
        86_400,
    )
    assert (settings.gateway.jobs_max("standard"), settings.gateway.jobs_max("batch")) == (
        256,
        10_000,
    )


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    settings = load(write(tmp_path, FULL), environment={})
    assert settings.redis.url == "redis://r:1/0"
    assert (settings.gateway.port, settings.gateway.wait_batch_s) == (8001, 3600)
    assert settings.gateway.cors_origins == ["https://a.example"]
    assert settings.dispatcher.metrics_port == 9090
    key = settings.keys[0]
    assert (key.user, key.weight, key.classes) == ("alice", 2, ["interactive", "standard"])
    model = settings.models["llama-3.1-8b"]
    assert model.aliases == ["gpt-4o-mini"]
    assert model.backends == [BackendSettings(url=GPU, engine="vllm", max_num_seqs=256)]
    assert [model.queue_limit(c) for c in ("interactive", "standard", "batch")] == [3, 3, 2]


def test_the_fair_order_is_read_whole(tmp_path: Path) -> None:
    settings = load(write(tmp_path, FULL), environment={})
    batch = settings.models["llama-3.1-8b"].of_class("batch")
    limits = (batch.wait_s, batch.inflight_max, batch.user_inflight_max, batch.jobs_max)
    assert limits == (60, 40, 8, 500)
    big = settings.models["big"]
    assert big.price == Price(input=0.5, cached_input=0.05, output=1.5)
    order = (big.fairness, big.class_policy, big.interactive_weight, big.floor_share)
    assert order == ("price", "strict", 2, 0)
    assert (big.slots, big.reserved_slots, big.engine_priority) == (64, 3, True)
    other = settings.models["other"]
    assert other.tokens == TokenWeights(input=1, cached=0, output=3)
    webui, team = settings.keys[1:]
    assert webui.user_from == ["header:X-OpenWebUI-User-Id", "body:user"]
    assert webui.shares and webui.key_jobs() == 300
    assert [(r.header, r.metadata, r.system, r.to) for r in webui.background] == [
        ("X-Task: ^title$", None, None, "batch"),
        (None, "task", None, "batch"),
        (None, None, "### Task:", "standard"),
    ]
    assert not team.shares and team.sub_users == "separate"


def test_of_the_fair_order_there_are_defaults() -> None:
    model = ModelSettings()
    assert (model.fairness, model.class_policy) == ("tokens", "weighted")
    assert (model.interactive_weight, model.floor_share, model.engine_priority) == (4, 0.02, False)
    assert (model.slots, model.reserved_slots, model.price) == (None, None, None)
    assert model.tokens == TokenWeights(input=1, cached=0.1, output=2)
    assert model.of_class("batch") == ClassSettings()
    key = KeySettings(secret="sk-alice-1", user="a", user_from=["body:user"])
    assert (key.sub_users, key.key_jobs()) == ("share", 10_000)
    assert not KeySettings(secret="sk-alice-1", user="a").shares


def test_options_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[gateway]\nhost = "1.1.1.1"\nport = 1\ndrain_s = 1\n')
    environment = {"FAIRLANE_GATEWAY_PORT": "2", "FAIRLANE_GATEWAY_DRAIN_S": "2.5"}
    settings = load(path, {"gateway": {"drain_s": 3}}, environment)
    assert settings.gateway.host == "1.1.1.1"
    assert (settings.gateway.port, settings.gateway.drain_s) == (2, 3)


@pytest.mark.parametrize(
    ("text", "name", "nearest"),
    [
        ("[gatway]\nport = 1", "gatway", "gateway"),
        ("[gateway]\nprot = 1", "gateway.prot", "port"),
        ("[dispatcher]\nmetric_port = 1", "dispatcher.metric_port", "metrics_port"),
        ('[[keys]]\nsecrets = "12345678"', "keys[].secrets", "secret"),
        ('[models.m]\nalias = ["x"]', "models.m.alias", "aliases"),
        ('[models.m]\nbackends = [{ uri = "x" }]', "models.m.backends[].uri", "url"),
        ("[models.m.class.batch]\nqueue_limits = 1", "models.m.class.batch.queue_limits",
         "queue_limit"),
        ("[models.m.class.batches]\nqueue_limit = 1", "models.m.class.batches", "batch"),
        ("[models.m]\ntokens = { inputs = 1 }", "models.m.tokens.inputs", "input"),
        ("[models.m]\nprice = { input = 1, outputs = 1 }", "models.m.price.outputs", "output"),
        ("[models.m]\nfloor_shares = 0", "models.m.floor_shares", "floor_share"),
        ("[models.m.class.batch]\nwait = 1", "models.m.class.batch.wait", "wait_s"),
        ('[[keys]]\nusers_from = []', "keys[].users_from", "user_from"),
        ('[[keys]]\nbackground = [{ heder = "A" }]', "keys[].background[].heder", "header"),
        ('[[backends]]\nurls = "http://h:1"', "backends[].urls", "url"),
        (BACKEND + 'engine = "vlm"', "backends[].engine", "vllm"),
        (BACKEND + 'engine = "SGLang"', "backends[].engine", "sglang"),
        (BACKEND + 'engine = "llama.cpp"', "backends[].engine", "llamacpp"),
        ('[models.m]\nbackends = [{ url = "http://h:1", engine = "tensorrt-llm" }]',
         "models.m.backends[].engine", "trtllm"),
        ('[models.m]\nfairness = "token"', "models.m.fairness", "tokens"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest_known(
    tmp_path: Path, text: str, name: str, nearest: str
) -> None:
    message = refusal(tmp_path, text)
    assert f"`{name}`" in message
    assert f"did you mean `{nearest}`?" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[keys]]\nsecret = "s"\nuser = "a"\nclasses = ["standard", "urgent"]',
         ["`urgent` of `keys[].classes`; it is one of interactive, standard, batch"]),
        ('[[keys]]\nsecret = "s"\nuser = "a"\nclasses = ["interactiv"]',
         ["`interactiv` of `keys[].classes`; did you mean `interactive`?"]),
        ('[[keys]]\nbackground = [{ header = "A", to = "zzz" }]',
         ["`zzz` of `keys[].background[].to`; it is one of interactive, standard, batch"]),
        ("[models.m.class.zzz]", ["`models.m.class.zzz`; it is one of interactive, standard, b"]),
        ('[models.m]\nfairness = "zzz"', ["; it is one of requests, tokens, time, price, kv"]),
    ],
)  # fmt: skip
def test_an_unknown_word_is_refused_with_those_that_may_be(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    message = refusal(tmp_path, text)
    assert all(w in message for w in words) and "Invalid enum" not in message


def test_an_unknown_name_like_no_other_is_refused_without_a_guess(tmp_path: Path) -> None:
    assert refusal(tmp_path, "[zzz]\nq = 1") == "unknown setting `zzz`"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[gateway]\nport = 65536", "gateway.port"),
        ("[gateway]\nport = -1", "gateway.port"),
        ('[gateway]\nport = "http"', "gateway.port"),
        ("[gateway]\nbody_max_bytes = 1", "gateway.body_max_bytes"),
        ("[gateway]\nwait_standard_s = 0", "gateway.wait_standard_s"),
        ("[redis]\ncommand_timeout_s = -1", "redis.command_timeout_s"),
        ("[dispatcher]\nkv_max = 1.5", "dispatcher.kv_max"),
        ("[dispatcher]\ntries_max = 0", "dispatcher.tries_max"),
        ("[models.m.class.batch]\nqueue_limit = 0", "queue_limit"),
        ('[models.m]\nbackends = [{ url = "http://h:1", max_num_seqs = 0 }]', "max_num_seqs"),
        ('[models.m]\nfairness = "beauty"', "fairness"),
        ('[models.m]\nclass_policy = "loose"', "class_policy"),
        ("[models.m]\ninteractive_weight = 0.5", "interactive_weight"),
        ("[models.m]\nfloor_share = 0.6", "floor_share"),
        ("[models.m]\nfloor_share = -0.1", "floor_share"),
        ("[models.m]\nslots = 0", "slots"),
        ("[models.m]\nreserved_slots = -1", "reserved_slots"),
        ("[models.m]\ntokens = { input = -1 }", "input"),
        ('[models.m]\nfairness = "price"\nprice = { input = 1 }', "output"),
        ("[models.m.class.batch]\nwait_s = 0", "wait_s"),
        ("[models.m.class.batch]\nuser_inflight_max = 0", "user_inflight_max"),
        ("[models.m.class.batch]\ntpot_ms = 0.5", "tpot_ms"),
        ("[models.m.class.batch]\ntpot_ms = 60001", "tpot_ms"),
        (KEY + "jobs_max = 0\nuser_from = ['body:user']", "jobs_max"),
        (KEY + 'sub_users = "apart"', "sub_users"),
        (KEY + 'background = [{ system = "x", to = "slow" }]', "background[].to"),
        ('[[keys]]\nsecret = "12345678"\nuser = ""', "user"),
        ('[[keys]]\nsecret = "12345678"\nuser = "u"\nweight = 0', "weight"),
        ('[[keys]]\nsecret = "12345678"\nuser = "u"\nclasses = []', "classes"),
        ('[[keys]]\nsecret = "12345678"\nuser = "u"\nclasses = ["fast"]', "classes"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_place(
    tmp_path: Path, text: str, place: str
) -> None:
    assert place in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[dispatcher]\nleader_renew_ms = 1000", "leader_renew_ms must leave time"),
        ("[dispatcher]\njob_renew_ms = 3000", "job_renew_ms must leave time"),
        ('[models.a]\naliases = ["x"]\n[models.b]\naliases = ["x"]', "share the name 'x'"),
        ('[models.a]\n[models.b]\naliases = ["a"]', "share the name 'a'"),
        ('[[keys]]\nsecret = "12345678"\nuser = "a"\n[[keys]]\nsecret = "12345678"\nuser = "b"',
         "the same secret"),
        ('[[keys]]\nsecret = "12345678"\nuser = "a"\nweight = 2\n'
         '[[keys]]\nsecret = "87654321"\nuser = "a"', "different weights"),
        ('[[keys]]\nuser = "a"', "exactly one of `secret` and `sha256`"),
        ('[[keys]]\nuser = "a"\nsecret = "short"', "8 to 4096"),
        ('[[keys]]\nuser = "a"\nsha256 = "zz"', "64 hexadecimal"),
        ('[models.m]\nfairness = "price"', "needs `price`"),
        ("[models.m]\ntokens = { cached = 2 }", "may not be above that of an input token"),
        ("[models.m]\ntokens = { input = 0, cached = 0, output = 0 }", "at least 0.001"),
        ("[models.m]\nprice = { input = 0, output = 0 }", "at least 0.001"),
        ("[models.m]\nprice = { input = 1, cached_input = 2, output = 1 }",
         "may not be above `input`"),
        ("[models.m]\nslots = 4\nreserved_slots = 4", "is below `slots`"),
        (KEY + 'user_from = ["X-User"]', "`header:<Name>` or `body:user`"),
        (KEY + 'user_from = ["body:name"]', "`header:<Name>` or `body:user`"),
        (KEY + 'user_from = ["header:"]', "names no HTTP header"),
        (KEY + 'user_from = ["header:X User"]', "names no HTTP header"),
        (KEY + 'user_from = ["header:X-User\\u0000"]', "names no HTTP header"),
        (KEY + 'user_from = ["header:Authorization"]', "holds a secret"),
        (KEY + 'sub_users = "separate"', "needs `user_from`"),
        (KEY + "jobs_max = 5", "`jobs_max` needs `user_from`"),
        (KEY + 'jobs_max = 5\nuser_from = ["body:user"]\nsub_users = "separate"',
         "`jobs_max` needs `user_from`"),
        (KEY + "background = [{}]", "exactly one of `header`, `metadata`, `system`"),
        (KEY + 'background = [{ header = "A", system = "b" }]', "exactly one of"),
        (KEY + 'background = [{ header = "A B: c" }]', "no such name"),
        (KEY + 'background = [{ header = ": c" }]', "no such name"),
        (KEY + 'background = [{ header = "A:" }]', "1 to 500 characters"),
        (KEY + 'background = [{ metadata = "=x" }]', "`key=pattern`"),
        (KEY + 'background = [{ system = "" }]', "1 to 500 characters"),
        (KEY + f'background = [{{ system = "{"x" * 501}" }}]', "1 to 500 characters"),
        (KEY + 'background = [{ system = "(" }]', "pattern is none"),
        (KEY + 'user_from = ["body:user"]\n[[keys]]\nsecret = "87654321"\nuser = "u"',
         "only some divide its share"),
        (KEY + 'user_from = ["body:user"]\nsub_users = "separate"\n'
         '[[keys]]\nsecret = "87654321"\nuser = "u/ann"', "has a name that a person of 'u' may"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, text: str, why: str) -> None:
    assert why in refusal(tmp_path, text)


def test_a_secret_is_in_no_message(tmp_path: Path) -> None:
    text = '[[keys]]\nuser = "a"\nsecret = "sk-hush"\nsha256 = "hush"'
    assert "hush" not in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "url",
    ["gpu1:8000", "ftp://gpu1", "http://", "http://h/v1", "http://u:p@h", "http://h:x",
     "http://h:99999", "http://[::1", "http://h h", "http://:80", "http://h?x=1", "http://h#x",
     "http://h:0", "http://a..b", "http://.", "http://a\0b", "http://a\x1bb", "http://h\n:1",
     "http://b\u00fccher.de", f"http://{'a' * 64}.b", "http://[h]", "http://999.1.1.1",
     "http://h:80x", "http://h%00", "http://a,b", "http://h\\x", f"http://{'a.' * 150}b"],
)  # fmt: skip
def test_a_backend_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a backend's url"):
        BackendSettings(url=url)


@pytest.mark.parametrize(
    "url",
    [
        GPU,
        "https://h",
        "http://10.0.0.1:1/",
        "http://[::1]:8000",
        "http://vllm_1",
        "http://h.:1",
        "http://xn--bcher-kva.de",
        "http://GPU-1.lan//",
        f"http://{'a' * 63}.b",
        "http://[fe80::1%eth0]",
    ],
)
def test_a_backend_that_is_an_address_is_taken(url: str) -> None:
    assert BackendSettings(url=url).url == url


@pytest.mark.parametrize("key", ["sk-h\u00fcsh", "sk-hush\n", "sk-\0hush", "sk-hush\x7f"])
def test_a_key_of_a_backend_that_no_header_can_hold_is_refused_and_not_told(key: str) -> None:
    with pytest.raises(ValueError, match="api_key") as refused:
        BackendSettings(url=GPU, api_key=key)
    assert "hush" not in str(refused.value)


def test_a_secret_and_its_digest_are_the_same_key() -> None:
    given = KeySettings(secret="sk-alice-1", user="a")
    assert given.digest() == KeySettings(sha256=given.digest().upper(), user="a").digest()


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    message = refusal(tmp_path, '[gateway]\nport = \nhost = "x"')
    assert "fairlane.toml" in message
    assert "line 2" in message


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a = 'x\x00'"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "fairlane.toml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"fairlane\.toml"):
        load(path, environment={})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*nowhere.*No such file"):
        load(tmp_path / "nowhere.toml", environment={})
