"""What of a changed configuration can be used at once."""

from common.config import load
from common.reload import live
from common.settings import Settings


def read(**data: object) -> Settings:
    return load(options=data, environment={})


OLD = {"models": {"m1": {"backends": [{"url": "http://a"}], "aliases": ["x"]}}}


def test_nothing_changed() -> None:
    assert live(read(**OLD), read(**OLD)) == (read(**OLD), [])


def test_keys_models_and_backends_are_live() -> None:
    new = read(
        keys=[{"secret": "sk-12345678", "user": "alice", "weight": 2.0}],
        models={"m1": {"backends": [{"url": "http://b"}], "interactive_weight": 2.0,
                       "class": {"batch": {"inflight_max": 3}}}, "m2": {}},
        backends=[{"url": "http://c"}],
    )  # fmt: skip
    assert live(read(**OLD), new) == (new, [])


def test_what_processes_must_agree_on_or_is_bound_at_the_start_is_not() -> None:
    new = read(
        gateway={"port": 9, "body_max_bytes": 4096}, redis={"url": "redis://other"},
        dispatcher={"poll_idle_ms": 7}, backends_file="f",
        models={"m1": {"class_policy": "strict", "fairness": "time", "slots": 9},
                "m2": {"class_policy": "strict"}},
    )  # fmt: skip
    settings, ignored = live(read(**OLD), new)
    assert sorted(ignored) == [
        "backends_file", "dispatcher.poll_idle_ms", "gateway.body_max_bytes", "gateway.port",
        "models.m1.class_policy", "models.m1.fairness", "models.m2.class_policy", "redis.url",
    ]  # fmt: skip
    assert settings == read(models={"m1": {"slots": 9}, "m2": {}})


def test_a_model_that_is_named_no_more_keeps_its_order() -> None:
    old = read(models={"m1": {"backends": [{"url": "http://a"}], "class_policy": "strict"}})
    settings, ignored = live(old, read())
    assert ignored == []
    assert settings == read(models={"m1": {"class_policy": "strict"}})
