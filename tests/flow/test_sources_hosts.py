"""What engines are asked for, where their names change and their addresses stay. Virtual time."""

import pytest

from common.settings import BackendSettings, ModelSettings, Settings
from tests.flow.test_sources import ENGINE, whole
from tests.flow.world import world
from tests.support.wait import pass_time

pytestmark = pytest.mark.looptime


def named(host: str, *, model: str) -> Settings:
    """A configuration whose one backend is found by this name, and serves what it lists besides."""
    backend = BackendSettings(url=f"http://{host}:8000", resolve=True)
    models = {model: ModelSettings(backends=[backend])} if model else {}
    return Settings(models=models, backends=[backend])


@pytest.mark.parametrize("model", ["m1", ""], ids=["configured", "listed"])
async def test_an_engine_whose_name_changes_is_asked_for_the_new_one(
    monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """By jobs and by polls; also where the address is known by several names, one of which goes."""
    async with world(monkeypatch, {"10.0.0.1": ENGINE}, model={"backends": []}) as w:
        w.names = {"old.svc": ["10.0.0.1"], "new.svc": ["10.0.0.1"]}
        (_, dispatcher), engine = w.dispatchers[0], w.engines["10.0.0.1"]
        for host in ("old.svc", "new.svc", "old.svc"):
            dispatcher.configure(named(host, model=model))
            await pass_time(12)
            engine.log.clear()
            asked = await w.ask("a")
            await w.answers(asked)
            assert whole([asked])
            await pass_time(12)
            seen = {(r.path, r.headers["host"]) for r in engine.log}
            assert {h for _, h in seen} == {f"{host}:8000"}
            assert {p for p, _ in seen} >= {"/metrics", "/v1/chat/completions"}
