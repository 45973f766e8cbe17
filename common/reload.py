"""What of a changed configuration can be used without a restart. Pure."""

import msgspec

from common.settings import ModelSettings, Settings

_FIXED = ("redis", "gateway", "dispatcher", "batch")
"""Sections that are read at the start alone."""
_FIXED_OF_MODEL = ("class_policy", "fairness")
"""How a model's jobs are ordered and counted: all processes must agree on it at all times."""


def live(old: Settings, new: Settings) -> tuple[Settings, list[str]]:
    """The settings to go on with, and the places of `new` that need a restart.

    A model that is named no more keeps its settings and loses its backends, for jobs of it may
    wait. One that is new has the default order until a restart, for it may be served already.
    """
    ignored = [
        f"{section}.{field}"
        for section in _FIXED
        for field in _differing(getattr(old, section), getattr(new, section))
    ]
    if old.backends_file != new.backends_file:
        ignored.append("backends_file")
    models = {
        name: msgspec.structs.replace(model, backends=[], aliases=[])
        for name, model in old.models.items()
    }
    for name, model in new.models.items():
        before = old.models.get(name) or ModelSettings()
        kept = {f: getattr(before, f) for f in _FIXED_OF_MODEL}
        ignored += [f"models.{name}.{f}" for f, v in kept.items() if getattr(model, f) != v]
        models[name] = msgspec.structs.replace(model, **kept)
    fixed = {section: getattr(old, section) for section in (*_FIXED, "backends_file")}
    return msgspec.structs.replace(new, models=models, **fixed), ignored


def _differing(old: msgspec.Struct, new: msgspec.Struct) -> list[str]:
    return [f for f in old.__struct_fields__ if getattr(old, f) != getattr(new, f)]
