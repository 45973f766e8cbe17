"""`/v1/batches`: OpenAI's Batch API. What is asked for goes into Redis; workers do the rest."""

import logging
import re
import secrets
from typing import Any

import msgspec

from common.batch_settings import BatchSettings
from common.batch_state import About, State, shown
from common.batches import Batches
from common.broker import Broker
from common.errors import BrokerError, StoreError
from common.intake.answers import (
    RETRY_S_MIN,
    Answer,
    Refusal,
    bad_request,
    unavailable,
)
from common.intake.routes import ROWS
from gateway.auth import Keys, asker
from gateway.client import Client
from gateway.files import Files
from gateway.files_form import EXPIRES_S_MAX, EXPIRES_S_MIN
from gateway.jobs import METADATA_TEXT, Metadata
from gateway.pages import json_page, listed
from gateway.people import Who
from gateway.query import limit, query

log = logging.getLogger("fairlane.gateway")

ENDPOINTS = tuple(row.path for row in ROWS)
BODY_BYTES_MAX = 64 << 10
"""16 pairs of metadata and some names."""
LIMIT_MAX, LIMIT = 100, 20
_ID = re.compile(r"batch_[0-9a-f]{32}\Z")
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([hm])\Z")
_RETRY_S = 10

NO_BATCH = Answer(status=404, message="No batch found with this id.", param="id")
"""The same for one that never was and for another's."""
_NO_FILE = Answer(status=404, message="No such File object.", param="input_file_id")
_NO_STORE = "Files cannot be reached just now. Try again later."


class _Expires(msgspec.Struct):
    anchor: str
    seconds: int


class _Asked(msgspec.Struct):
    """A body, each part of which is checked alone, so that the answer names it."""

    input_file_id: Any = None
    endpoint: Any = None
    completion_window: Any = None
    metadata: Any = None
    output_expires_after: Any = None


class BatchesApi:
    """Its handlers. They raise Refusal and ClientGone."""

    def __init__(self, keys: Keys, files: Files, broker: Broker, settings: BatchSettings) -> None:
        self._keys = keys
        self._files = files
        self._broker = broker
        self._batches = Batches(broker, settings.keep_days * 86_400_000)
        self._settings = settings

    async def collection(self, client: Client) -> None:
        """`/v1/batches`: list or create."""
        try:
            if client.method == "POST":
                await self._create(client)
            else:
                await self._list(client)
        except BrokerError:
            raise Refusal(unavailable(RETRY_S_MIN)) from None
        except StoreError as e:
            log.warning("the store of files: %s", e)
            raise Refusal(unavailable(_RETRY_S, _NO_STORE)) from None

    async def item(self, client: Client) -> None:
        """`/v1/batches/{id}`: look."""
        try:
            about, state = await self._found(client)
        except BrokerError:
            raise Refusal(unavailable(RETRY_S_MIN)) from None
        await json_page(client, shown(about, state))

    async def cancel(self, client: Client) -> None:
        """`/v1/batches/{id}/cancel`: one that is cancelled already, or about to end, stays so."""
        await client.read_body(BODY_BYTES_MAX)
        try:
            about, _ = await self._found(client)
            status = await self._batches.cancel(about.id)
            if status in ("completed", "failed", "expired"):
                text = f"Cannot cancel a batch with status '{status}'."
                raise bad_request(text, code="batch_not_cancellable")
            about, state = await self._found(client)
        except BrokerError:
            raise Refusal(unavailable(RETRY_S_MIN)) from None
        await json_page(client, shown(about, state))

    async def _create(self, client: Client) -> None:
        principal = self._keys.principal(client.authorization)
        who = self._who(client)
        owner = who.path
        asked = _asked(await client.read_body(BODY_BYTES_MAX))
        file_id, endpoint, window, window_ms = _checked(asked, self._settings)
        record = await self._files.find(owner, file_id)
        if record is None:
            raise Refusal(_NO_FILE)
        if record.purpose != "batch":
            text = f"The file's purpose is '{record.purpose}': it must be 'batch'."
            raise bad_request(text, "input_file_id", "invalid_file_purpose")
        await self._room(owner)
        about = About(
            id=f"batch_{secrets.token_hex(16)}", owner=owner, user=who.user, sub=who.sub,
            weight=principal.weight, cls=principal.classes[0], models=sorted(principal.models),
            key_jobs=principal.key_jobs, endpoint=endpoint, input_file_id=file_id, window=window,
            window_ms=window_ms, created_ms=await self._broker.now_ms(),
            metadata=_metadata(asked.metadata),
            output_expires_s=_expires(asked.output_expires_after),
        )  # fmt: skip
        await self._batches.create(about)
        await json_page(client, shown(about, State()))

    async def _room(self, owner: str) -> None:
        """Raises Refusal where there are as many batches as may be."""
        active = await self._batches.active(self._settings.active_max)
        most = self._settings.user_active_max
        if sum(of == owner for _, of in active) >= most:
            text = f"You have {most} batches that are not over. Wait for one, or cancel it."
            raise Refusal(
                Answer(
                    status=429,
                    message=text,
                    type="rate_limit_error",
                    code="too_many_batches",
                    retry_after_s=60,
                )
            )
        if len(active) >= self._settings.active_max:
            raise Refusal(unavailable(60, "Too many batches are under way. Try again later."))

    async def _list(self, client: Client) -> None:
        asked = query(client)
        after, most = asked.get("after", ""), limit(asked, LIMIT_MAX, LIMIT)
        found, more = await self._batches.own(self._who(client).path, after, most)
        data = [shown(*batch) for batch in found]
        await json_page(client, listed(data, more))

    async def _found(self, client: Client) -> tuple[About, State]:
        """Raises Refusal, BrokerError."""
        owner, id = self._who(client).path, client.scope["path_params"]["id"]
        found = await self._batches.find(id) if _ID.match(id) else None
        if found is None or found[0].owner != owner:
            raise Refusal(NO_BATCH)
        return found

    def _who(self, client: Client) -> Who:
        principal = self._keys.principal(client.authorization)
        return asker(principal, client.headers, client.authorization, client.peer)


def _asked(body: bytes) -> _Asked:
    try:
        return msgspec.json.decode(body, type=_Asked)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise bad_request("The request body is not a JSON object.", code="invalid_json") from None


def _checked(asked: _Asked, settings: BatchSettings) -> tuple[str, str, str, int]:
    """(file, endpoint, window, its ms). Raises Refusal."""
    given = {}
    for name in ("input_file_id", "endpoint", "completion_window"):
        value = getattr(asked, name)
        if value is None:
            text = f"Missing required parameter: '{name}'."
            raise bad_request(text, name, "missing_required_parameter")
        if not isinstance(value, str):
            raise bad_request(
                f"Invalid type for '{name}': expected a string.", name, "invalid_type"
            )
        given[name] = value
    if given["endpoint"] not in ENDPOINTS:
        known = ", ".join(f"'{p}'" for p in ENDPOINTS)
        text = f"Invalid value: {given['endpoint'][:100]!r}. Supported values are: {known}."
        raise bad_request(text, "endpoint", "invalid_value")
    found, most = _WINDOW.match(given["completion_window"]), settings.window_max_h
    minutes = int(found[1]) * (60 if found[2] == "h" else 1) if found else 0
    if not 1 <= minutes <= most * 60:
        text = f"`completion_window` is '24h', or another from '1m' to '{most}h'."
        raise bad_request(text, "completion_window", "invalid_value")
    return given["input_file_id"], given["endpoint"], given["completion_window"], minutes * 60_000


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    try:
        return msgspec.convert(given, Metadata)
    except msgspec.ValidationError:
        raise bad_request(METADATA_TEXT, "metadata", "invalid_value") from None


def _expires(given: Any) -> int | None:
    if given is None:
        return None
    try:
        asked = msgspec.convert(given, _Expires)
    except msgspec.ValidationError:
        asked = _Expires("", 0)
    if asked.anchor != "created_at" or not EXPIRES_S_MIN <= asked.seconds <= EXPIRES_S_MAX:
        text = (
            "`output_expires_after` has the anchor 'created_at' and from "
            f"{EXPIRES_S_MIN} to {EXPIRES_S_MAX} seconds."
        )
        raise bad_request(text, "output_expires_after", "invalid_value")
    return asked.seconds
