"""The kinds of engines that are known, and which one a page or a refusal is of."""

from collections.abc import Mapping

from dispatcher.engines.adapter import BUSY, Adapter
from dispatcher.engines.llamacpp import LLAMACPP
from dispatcher.engines.sglang import SGLANG
from dispatcher.engines.tgi import TGI
from dispatcher.engines.trtllm import TRTLLM
from dispatcher.engines.vllm import VLLM

ADAPTERS: Mapping[str, Adapter] = {a.kind: a for a in (VLLM, SGLANG, TGI, LLAMACPP, TRTLLM)}
"""By their names in the configuration; `none` and `auto` are not among them."""
NONE, AUTO = "none", "auto"


def recognise(page: bytes) -> str | None:
    """The kind whose page this is, by the names that are there; None: no known one's."""
    return next((kind for kind, adapter in ADAPTERS.items() if adapter.shown(page)), None)


def busy(kind: str | None, status: int | None, body: bytes) -> bool:
    """Whether an answer says "busy, not me": the job is as good as never sent.

    `kind` None or `none`: whatever any known engine says. `status` None: it is the error event of a
    stream that has told nothing else.
    """
    own = ADAPTERS.get(kind or NONE)
    known = list(ADAPTERS.values()) if own is None else [own]
    of_kind = (refusal for adapter in known for refusal in adapter.refusals)
    if status is None:
        return any(r.status is None and r.fits(None, body) for r in of_kind)
    return any(r.fits(status, body) for r in (*BUSY, *of_kind))
