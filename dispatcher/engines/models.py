"""The list of models that an engine serves: OpenAI's `/v1/models`, which all kinds have."""

import msgspec

MODELS_MAX = 1_000
"""More served names than that are cut off."""
NAME_MAX = 256
"""Characters of a name; longer ones are left out: they would be told to everybody, all the time."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


def read_models(page: bytes) -> tuple[str, ...] | None:
    """The names on the page, each once; None: it is not such a list."""
    try:
        listed = _models.decode(page)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    names = dict.fromkeys(m.id for m in listed.data if 0 < len(m.id) <= NAME_MAX)
    return tuple(names)[:MODELS_MAX]
