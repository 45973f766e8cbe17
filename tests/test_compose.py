"""compose.yaml and what it mounts: valid, complete, and of one mind.

No container runs here. `service_command` gives other tests each service's command, so that they
can start the same processes on the loopback address.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from common.config import load

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "tests/support/compose-spec.json"
CONFIGS = {"": "deploy/fairlane.toml", "gpu": "deploy/fairlane.gpu.toml"}
"""Profile -> the configuration that goes with it."""
FAIRLANE = {
    "gateway-1", "gateway-2", "dispatcher-1", "dispatcher-2", "batch-worker-1", "batch-worker-2",
    "sim-1", "sim-2",
}  # fmt: skip
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def compose() -> dict[str, Any]:
    """compose.yaml with each `${NAME:-default}` as its default."""
    text = VARIABLE.sub(lambda m: m[2] or "", (ROOT / "compose.yaml").read_text())
    data: dict[str, Any] = yaml.safe_load(text)
    return data


def service_command(name: str, substitutions: Mapping[str, str]) -> list[str]:
    """The command of a service of compose.yaml, to be run as a plain process.

    `substitutions` replaces whole words of it: {"redis://redis:6379/0": url, "0.0.0.0":
    "127.0.0.1", "8000": str(port), "fairlane": path_of_the_script, …}. Raises KeyError for a word
    that the command does not have, so that a test notices when the two part ways.
    """
    command: list[str] = compose()["services"][name]["command"]
    if unknown := sorted(set(substitutions) - set(command)):
        raise KeyError(f"{name} has no {unknown} in {command}")
    return [substitutions.get(word, word) for word in command]


def service_config(profile: str, substitutions: Mapping[str, str]) -> str:
    """The configuration mounted in `profile` ("" or "gpu"), with each text given replaced.

    For the backends' addresses: {"http://sim-1:9000": "http://127.0.0.1:…"}. Raises KeyError for a
    text that is not in it.
    """
    text = (ROOT / CONFIGS[profile]).read_text()
    for old, new in substitutions.items():
        if old not in text:
            raise KeyError(f"no {old!r} in {CONFIGS[profile]}")
        text = text.replace(old, new)
    return text


def option(name: str, flag: str) -> str:
    command = service_command(name, {})
    return command[command.index(flag) + 1]


def complaints(data: dict[str, Any]) -> list[str]:
    """What the Compose Specification's schema has against `data`."""
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    return [f"{'/'.join(map(str, e.path))}: {e.message}" for e in validator.iter_errors(data)]


def test_it_follows_the_compose_specification() -> None:
    assert complaints(compose()) == []


def test_the_schema_finds_a_fault() -> None:
    data = compose()
    data["services"]["redis"]["helthcheck"] = {}
    data["services"]["sim-1"]["ports"] = "8000"
    found = " ".join(complaints(data))
    assert "services/redis: Unevaluated properties are not allowed ('helthcheck'" in found
    assert "services/sim-1/ports: '8000' is not of type 'array'" in found


def test_the_services_of_each_profile() -> None:
    services = compose()["services"]
    default = {n for n, s in services.items() if not s.get("profiles")}
    assert default == FAIRLANE | {"redis", "prometheus"}
    assert {n for n, s in services.items() if s.get("profiles") == ["gpu"]} == {"vllm"}


def test_what_services_depend_on_starts_with_them_and_has_a_health_check() -> None:
    services = compose()["services"]
    for name, service in services.items():
        for needed in service.get("depends_on", {}):
            other = services[needed]
            assert set(other.get("profiles", [])) <= set(service.get("profiles", [])), name
            assert "test" in other["healthcheck"], f"{name} waits for {needed}"


def test_mounted_files_and_named_volumes_are_there() -> None:
    data = compose()
    for name, service in data["services"].items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).is_file(), f"{name} mounts {source}"
            else:
                assert source in data["volumes"], f"{name} mounts {source}"


def test_the_image_is_built_from_files_that_reach_the_daemon() -> None:
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, re.M)
    sources = " ".join(copied).split()
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    assert {p.split(".")[0] for p in packages} <= set(sources)
    assert [s for s in sources if f"!{s}" not in sent] == []
    assert [s for s in sources if not (ROOT / s).exists()] == []
    for name in FAIRLANE:
        build = compose()["services"][name]["build"]
        assert (ROOT / build["context"] / build["dockerfile"]).is_file()


def test_the_image_runs_as_an_ordinary_user() -> None:
    last_stage = (ROOT / "deploy/Dockerfile").read_text().rpartition("\nFROM ")[2]
    assert re.search(r"^USER (?!root|0)\S+$", last_stage, re.M)


def test_ports_are_published_on_loopback_alone_for_the_keys_are_public() -> None:
    for name, service in compose()["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port}"


@pytest.mark.parametrize("path", CONFIGS.values())
def test_the_configuration_loads_and_has_keys(path: str) -> None:
    settings = load(ROOT / path, environment={})
    assert len({k.digest() for k in settings.keys}) == len(settings.keys) >= 2
    assert settings.models


@pytest.mark.parametrize(("profile", "path"), CONFIGS.items())
def test_backends_are_services_that_serve_this_model_on_this_port(profile: str, path: str) -> None:
    services = compose()["services"]
    for model, settings in load(ROOT / path, environment={}).models.items():
        for backend in settings.backends:
            host, _, port = backend.url.removeprefix("http://").partition(":")
            name_flag = "--served-model-name" if host == "vllm" else "--model"
            assert services[host].get("profiles", []) == ([profile] if profile else [])
            assert option(host, "--port") == port
            assert option(host, name_flag) == model
            assert option(host, "--max-num-seqs") == str(backend.max_num_seqs)


def test_prometheus_scrapes_every_part() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    targets = [
        t for j in config["scrape_configs"] for s in j["static_configs"] for t in s["targets"]
    ]
    assert {t.split(":")[0] for t in targets} == FAIRLANE | {"vllm"}
    for target in targets:
        name, _, port = target.partition(":")
        assert option(name, "--metrics-port" if "dispatcher" in name else "--port") == port


def test_health_checks_ask_the_port_that_the_command_opens() -> None:
    for name in FAIRLANE | {"vllm"}:
        port = option(name, "--metrics-port" if "dispatcher" in name else "--port")
        code = compose()["services"][name]["healthcheck"]["test"][-1]
        assert f'"http://127.0.0.1:{port}/health' in code
        compile(code, name, "exec")


def test_redis_keeps_what_it_accepted() -> None:
    assert option("redis", "--appendonly") == "yes"
    assert option("redis", "--appendfsync") == "everysec"
    assert option("redis", "--maxmemory-policy") == "noeviction"


def test_service_command_replaces_whole_words_and_refuses_unknown_ones() -> None:
    command = service_command("gateway-2", {"redis://redis:6379/0": "redis://x", "8000": "1"})
    assert command[:2] == ["fairlane", "gateway"]
    assert command[command.index("--redis") + 1] == "redis://x"
    assert command[command.index("--port") + 1] == "1"
    with pytest.raises(KeyError, match="9999"):
        service_command("sim-1", {"9999": "1"})


def test_service_config_replaces_addresses() -> None:
    text = service_config("", {"http://sim-1:9000": "http://127.0.0.1:1"})
    backends = tomllib.loads(text)["models"]["sim-small"]["backends"]
    assert [b["url"] for b in backends] == ["http://127.0.0.1:1", "http://sim-2:9000"]
    with pytest.raises(KeyError, match="nowhere"):
        service_config("", {"http://nowhere:1": ""})
