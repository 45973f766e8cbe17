"""Settings from `FAIRLANE_*` variables."""

import pytest

from common.config import load, read_environment
from common.errors import ConfigError


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


def test_an_unknown_variable_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match=r"FAIRLANE_GATEWAY_PROT.*`FAIRLANE_GATEWAY_PORT`"):
        load(environment={"FAIRLANE_GATEWAY_PROT": "1"})


def test_where_the_commands_find_a_gateway_is_no_setting() -> None:
    """Who sets that for the commands starts a gateway in the same shell."""
    called = {"FAIRLANE_API_URL": "http://x", "FAIRLANE_API_KEY": "k"}
    assert load(environment=called) == load(environment={})
