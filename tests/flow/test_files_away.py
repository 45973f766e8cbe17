"""A store of files that is not there: a share that is not mounted, a bucket that was removed."""

from pathlib import Path

import pytest

from tests.flow.test_batches_api import GIVEN, post
from tests.support.files import error, form, get, keeping, kept, upload
from tests.support.gateway import Site
from tests.support.s3 import s3

FILE = "file-" + "0" * 44


async def refused(s: Site, log: pytest.LogCaptureFixture, why: str) -> None:
    """Whatever is asked of it is an error that may be tried again, not a file that is none."""
    asked = [("GET", ""), ("GET", f"/{FILE}"), ("DELETE", f"/{FILE}"), ("GET", f"/{FILE}/content")]
    for e in [
        *[await get(s.app, f"/v1/files{path}", method=method) for method, path in asked],
        await upload(s.app, body=form()),
        await post(s.app, "/v1/batches", {"input_file_id": FILE, **GIVEN}),
    ]:
        assert e.status == 503 and 1 <= int(e.headers["retry-after"]) <= 60
        assert error(e)["type"] == "server_error" and why not in e.body.decode()
    assert log.text.count(f"the store of files: {why}") == len(asked) + 2


async def test_a_directory_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first request, and later."""
    root = tmp_path / "share"
    async with keeping(root) as s:
        await refused(s, caplog, "the store's directory is not there")
        assert not root.exists(), "what is mounted on it would hide what it has"
        root.mkdir()
        id = (await upload(s.app, body=form())).json["id"]
        assert (await get(s.app, f"/v1/files/{FILE}")).status == 404
        root.rename(tmp_path / "away")
        caplog.clear()
        await refused(s, caplog, "the store's directory is not there")
        (tmp_path / "away").rename(root)
        assert (await get(s.app, f"/v1/files/{id}")).json["id"] == id
        assert len(kept(root)) == 2


async def test_a_bucket_that_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with s3() as (fake, options):
        fake.gone = True
        async with keeping(tmp_path, url="s3://bucket/files", options=options) as s:
            await refused(s, caplog, "the bucket is not there")
            fake.gone = False
            assert (await get(s.app, f"/v1/files/{FILE}")).status == 404
