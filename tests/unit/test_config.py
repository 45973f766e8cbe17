"""Settings: where they come from, which wins, what is refused and in which words."""

from pathlib import Path
from typing import Any

import pytest

from common.config import load, read_environment
from common.errors import ConfigError
from common.settings import BackendSettings, KeySettings

GPU = "http://gpu1:8000"
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
    assert model.backends == [BackendSettings(url=GPU, max_num_seqs=256)]
    assert [model.queue_limit(c) for c in ("interactive", "standard", "batch")] == [3, 3, 2]


def test_options_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[gateway]\nhost = "1.1.1.1"\nport = 1\ndrain_s = 1\n')
    environment = {"FAIRLANE_GATEWAY_PORT": "2", "FAIRLANE_GATEWAY_DRAIN_S": "2.5"}
    settings = load(path, {"gateway": {"drain_s": 3}}, environment)
    assert settings.gateway.host == "1.1.1.1"
    assert (settings.gateway.port, settings.gateway.drain_s) == (2, 3)


def test_the_environment_is_read_as_its_setting_has_it() -> None:
    environment = {
        "FAIRLANE_REDIS_URL": "redis://x",
        "FAIRLANE_GATEWAY_INSECURE": "true",
        "FAIRLANE_DISPATCHER_METRICS_PORT": "9100",
        "FAIRLANE_DISPATCHER_KV_MAX": "0.5",
        "PATH": "/bin",
        "fairlane_gateway_port": "1",
    }
    settings = load(environment=environment)
    assert settings.redis.url == "redis://x"
    assert settings.gateway.insecure is True
    assert (settings.dispatcher.metrics_port, settings.dispatcher.kv_max) == (9100, 0.5)
    assert settings.gateway.port == 8000


def test_the_process_environment_counts_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAIRLANE_GATEWAY_PORT", "4321")
    assert read_environment() == {"gateway": {"port": "4321"}}
    assert load().gateway.port == 4321


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
        ('[[backends]]\nurls = "http://h:1"', "backends[].urls", "url"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_refused_with_the_nearest_known(
    tmp_path: Path, text: str, name: str, nearest: str
) -> None:
    message = refusal(tmp_path, text)
    assert f"`{name}`" in message
    assert f"did you mean `{nearest}`?" in message


def test_an_unknown_name_like_no_other_is_refused_without_a_guess(tmp_path: Path) -> None:
    assert refusal(tmp_path, "[zzz]\nq = 1") == "unknown setting `zzz`"


def test_an_unknown_variable_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match=r"FAIRLANE_GATEWAY_PROT.*`FAIRLANE_GATEWAY_PORT`"):
        load(environment={"FAIRLANE_GATEWAY_PROT": "1"})


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
     "http://h:99999", "http://[::1", "http://h h", "http://:80", "http://h?x=1"],
)  # fmt: skip
def test_a_backend_that_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="a backend's url"):
        BackendSettings(url=url)


@pytest.mark.parametrize("url", [GPU, "https://h", "http://10.0.0.1:1/", "http://[::1]:8000"])
def test_a_backend_that_is_an_address_is_taken(url: str) -> None:
    assert BackendSettings(url=url).url == url


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
