"""How settings are read: options over environment over the TOML file over defaults.

A scalar of a section is set by `FAIRLANE_<SECTION>_<NAME>`, such as `FAIRLANE_GATEWAY_PORT`.
An unknown name is refused with the nearest known one, for a typo must not be a silent default.
This is the only file that reads the environment.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from common.batch_settings import BatchSettings
from common.errors import ConfigError
from common.keys import CLASSES
from common.settings import (
    BackendSettings,
    DispatcherSettings,
    GatewaySettings,
    RedisSettings,
    Settings,
)
from common.store_settings import StoreSettings

ENV_PREFIX = "FAIRLANE_"
API_KEY, API_URL = "FAIRLANE_API_KEY", "FAIRLANE_API_URL"
"""Variables of commands that ask a gateway: no settings, and set where a gateway may start, too."""
T = TypeVar("T")


def read_file(path: Path) -> dict[str, Any]:
    """A TOML file as plain data. Raises ConfigError with the path and what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    return parse_toml(data, path)


def parse_toml(data: bytes, path: Path) -> dict[str, Any]:
    """The bytes of a TOML file as plain data. Raises ConfigError with the path."""
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ConfigError(f"{path}: {e}") from None


class _Backends(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    backends: list[BackendSettings]


def parse_backends(data: bytes, path: Path) -> list[BackendSettings]:
    """A file of backends: `[[backends]]` in TOML; in JSON (`.json`) the same, or the list alone.

    Raises ConfigError with the path, the place, and for an unknown name the nearest known.
    """
    if path.suffix.lower() == ".json":
        try:
            read = json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ConfigError(f"{path}: {e}") from None
    else:
        read = parse_toml(data, path)
    try:
        found: _Backends = converted(_Backends, {"backends": read} if type(read) is list else read)
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from None
    return found.backends


def converted(struct: type[T], data: Any) -> T:
    """Plain data as a struct of settings. Raises ConfigError, whose text names the place and, for
    an unknown name, the nearest known."""
    _refuse_unknown(struct, data, "")
    try:
        return msgspec.convert(data, struct, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(_place(str(e))) from None
    except ValueError as e:
        raise ConfigError(str(e)) from None


def read_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`FAIRLANE_*` variables as the data a file would give. Raises ConfigError."""
    names = _environment_names()
    data: dict[str, Any] = {}
    for variable, text in (os.environ if environment is None else environment).items():
        if not variable.startswith(ENV_PREFIX) or variable in (API_KEY, API_URL):
            continue
        if variable not in names:
            raise ConfigError(f"unknown variable {variable}{_nearest(variable, names)}")
        section, field = names[variable]
        data.setdefault(section, {})[field] = text
    return data


def load(
    path: Path | None = None,
    options: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    data: bytes | None = None,
) -> Settings:
    """The settings of a process. `options` are nested like the file and win over all. `data`: what
    the file holds, read already.

    Raises ConfigError, whose text names the place and, for an unknown name, the nearest known.
    """
    merged: dict[str, Any] = {}
    if path is not None:
        merged = read_file(path) if data is None else parse_toml(data, path)
    for layer in (read_environment(environment), options or {}):
        merged = _merged(merged, layer)
    return converted(Settings, merged)


def state_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where this user's programs keep what is neither configuration nor cache, by the XDG Base
    Directory Specification. Raises ConfigError where no such place is known."""
    known = os.environ if environment is None else environment
    state = known.get("XDG_STATE_HOME", "")
    if state.startswith("/"):  # a relative one is to be ignored
        return Path(state) / "fairlane"
    try:
        return Path(known.get("HOME") or Path.home()) / ".local" / "state" / "fairlane"
    except RuntimeError:
        raise ConfigError("no home directory: set store.url or FAIRLANE_STORE_URL") from None


def _merged(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(low)
    for name, value in high.items():
        old = out.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[name] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return out


def _place(message: str) -> str:
    text, _, path = message.partition(" - at `")
    return f"{path.rstrip('`').removeprefix('$.')}: {text}" if path else text


def _environment_names() -> dict[str, tuple[str, str]]:
    sections: tuple[tuple[str, type[msgspec.Struct]], ...] = (
        ("redis", RedisSettings),
        ("gateway", GatewaySettings),
        ("dispatcher", DispatcherSettings),
        ("store", StoreSettings),
        ("batch", BatchSettings),
    )
    names = {}
    for section, struct in sections:
        for field in msgspec.structs.fields(struct):
            if not str(field.type).startswith(("list", "dict")):
                variable = f"{ENV_PREFIX}{section}_{field.encode_name}".upper()
                names[variable] = (section, field.encode_name)
    return names


def _refuse_unknown(struct: Any, data: Any, where: str) -> None:
    """ConfigError for the first name that the struct at this place does not have."""
    if not isinstance(data, Mapping):
        return
    fields: dict[str, Any] = {f.encode_name: f.type for f in msgspec.structs.fields(struct)}
    for name, value in data.items():
        if name not in fields:
            raise ConfigError(f"unknown setting `{where}{name}`{_nearest(name, fields)}")
        known = _choices(fields[name])
        for word in value if isinstance(value, list) else (value,):
            if known and isinstance(word, str) and word not in known:
                more = _nearest(word, known) or _one_of(known)
                raise ConfigError(f"unknown value `{word}` of `{where}{name}`{more}")
        inner = _struct_in(fields[name])
        if inner is None:
            continue
        if isinstance(value, list):
            for item in value:
                _refuse_unknown(inner, item, f"{where}{name}[].")
        elif str(fields[name]).startswith("dict") and isinstance(value, Mapping):
            for key, item in value.items():
                if name == "class" and key not in CLASSES:
                    more = _nearest(key, CLASSES) or _one_of(CLASSES)
                    raise ConfigError(f"unknown class `{where}{name}.{key}`{more}")
                _refuse_unknown(inner, item, f"{where}{name}.{key}.")
        else:
            _refuse_unknown(inner, value, f"{where}{name}.")


def _choices(type_: Any) -> tuple[str, ...]:
    """The words that a setting, or each item of a list, may be, where these are listed."""
    if get_origin(type_) is Literal:
        return get_args(type_)
    return next((known for part in get_args(type_) if (known := _choices(part))), ())


def _struct_in(type_: Any) -> Any:
    """The struct that a type is, or is a list, mapping or union of."""
    if isinstance(type_, type) and issubclass(type_, msgspec.Struct):
        return type_
    inner = (_struct_in(part) for part in getattr(type_, "__args__", ()))
    return next((struct for struct in inner if struct is not None), None)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""


def _one_of(known: Iterable[str]) -> str:
    return f"; it is one of {', '.join(known)}"
