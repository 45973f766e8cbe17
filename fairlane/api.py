"""A gateway as the commands see it: HTTP, and its errors as one line."""

import contextlib
from collections.abc import Iterator
from typing import Any

import click
import httpx

AGAIN_S_MAX = 10.0
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
LATER = (429, 500, 502, 503, 504)
"""Statuses after which a read is tried again."""


class ApiError(click.ClickException):
    """What the gateway said, or that it said nothing. Exit code 2."""

    exit_code = 2

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """The HTTP API of a gateway, with one key."""

    def __init__(self, url: str, key: str | None) -> None:
        """`url` may be the one that OpenAI's clients are given, with `/v1` at its end. Raises
        ApiError where one of the two cannot be used; it does not say what the key is."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ApiError("--key has characters that no key has")
        if not url.startswith(("http://", "https://")):
            raise ApiError(f"--url must begin with http:// or https://, and is {url}")
        url = url.rstrip("/").removesuffix("/v1")
        try:
            self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)
        except (httpx.InvalidURL, ValueError) as e:
            raise ApiError(f"--url cannot be used: {e}") from None
        self._url = url

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.close()

    def get(self, path: str, timeout: httpx.Timeout = TIMEOUT, **params: Any) -> Any:
        """Read something, once. Raises ApiError."""
        return self._once("GET", path, params=params, timeout=timeout)

    def post(self, path: str, **more: Any) -> Any:
        """Change something, once. Raises ApiError."""
        return self._once("POST", path, **more)

    def delete(self, path: str) -> Any:
        """Remove something. Raises ApiError."""
        return self._once("DELETE", path)

    @contextlib.contextmanager
    def stream(self, path: str, headers: dict[str, str] | None = None) -> Iterator[httpx.Response]:
        """A long answer, as it comes. Raises ApiError; what breaks it later is httpx's."""
        timeout = httpx.Timeout(60.0, connect=10.0)
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    raise _error(answer)
                yield answer
        except httpx.ConnectError as e:
            raise self._silent(e) from None

    def _once(self, method: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(method, path, **more)
        except httpx.HTTPError as e:
            raise self._silent(e) from None
        if answer.status_code >= 400:
            raise _error(answer)
        try:
            return answer.json()
        except ValueError:
            raise ApiError(f"{self._url} does not answer as a gateway does") from None

    def _silent(self, error: Exception) -> ApiError:
        return ApiError(f"{self._url} does not answer: {error or type(error).__name__}")


def _error(answer: httpx.Response) -> ApiError:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.reason_phrase
    return ApiError(f"{message} (status {answer.status_code})", answer.status_code)
