"""Settings of the store: what is refused, and where the default is."""

from pathlib import Path
from typing import Any

import pytest

from common.config import load, state_folder
from common.errors import ConfigError
from common.settings import Settings


def test_from_the_environment() -> None:
    variables = {"FAIRLANE_STORE_URL": "s3://b/p", "FAIRLANE_STORE_FILES_MAX_BYTES": "4096"}
    store = load(environment=variables).store
    assert (store.url, store.files_max_bytes) == ("s3://b/p", 4096)
    with pytest.raises(ConfigError, match="FAIRLANE_STORE_OPTIONS"):
        load(environment={"FAIRLANE_STORE_OPTIONS": "x"})


def of(**store: Any) -> Settings:
    return load(options={"store": store}, environment={})


@pytest.mark.parametrize("url", ["file:///a", "s3://b", "gs://b/p", "az://c/p", "memory:///"])
def test_places(url: str) -> None:
    assert of(url=url, options={"aws_region": "x"}).store.url == url


@pytest.mark.parametrize(
    ("url", "text"),
    [("ftp://x", "file://, s3://"), ("/a/b", "file://"), ("file://a/b", "absolute"),
     ("file:a", "absolute"), ("s3:///p", "bucket"), ("s3://key:secret@bucket", "options"),
     ("az://c?sig=1", "options"), ("s3://[", "url"), ("", "file://")],
)  # fmt: skip
def test_no_places(url: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as e:
        of(url=url)
    assert "secret" not in str(e.value)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean `files_max_bytes`"):
        of(file_max_bytes=5_000)
    with pytest.raises(ConfigError):
        of(user_files_max=10_001)


def test_the_state_folder() -> None:
    assert state_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/fairlane")
    assert state_folder({"XDG_STATE_HOME": "s", "HOME": "/h"}) == Path("/h/.local/state/fairlane")
