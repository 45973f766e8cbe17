"""The kinds of engines, by their names in the configuration (`BackendSettings.engine`)."""

from collections.abc import Callable, Mapping

from dispatcher.engines import vllm
from dispatcher.engines.facts import EngineFacts

Reader = Callable[[bytes, str | None], EngineFacts]

READERS: Mapping[str, Reader] = {"vllm": vllm.read}
"""How the page of each kind of engine is read."""
