"""As much of S3 as obstore asks of it: objects in memory, uploads in parts, listings by prefix."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

from starlette.requests import Request
from starlette.responses import Response

from common.service import bind, running, serve_asgi

_DATE = "2026-01-01T00:00:00.000Z"


class FakeS3:
    """An ASGI app. Signatures are not looked at."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        """Parts of uploads that are neither completed nor aborted."""
        self.gone = False
        """Whether there is no such bucket."""
        self._next = 0

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        query = {k: v[0] for k, v in parse_qs(request.url.query, keep_blank_values=True).items()}
        key = request.url.path.partition("/bucket")[2].lstrip("/")
        response = self._answer(request, key, query, await request.body())
        await response(scope, receive, send)

    def _answer(self, request: Request, key: str, query: dict[str, str], body: bytes) -> Response:
        if self.gone:
            return _xml("<Error><Code>NoSuchBucket</Code></Error>", 404)
        if "list-type" in query:
            return self._list(query)
        if "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", body.decode())
            for name in names:
                self.objects.pop(name, None)
            gone = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return _xml(f"<DeleteResult>{gone}</DeleteResult>")
        if "uploads" in query:
            self._next += 1
            id = f"u{self._next}"
            self.uploads[id] = {}
            names = f"<Bucket>b</Bucket><Key>{key}</Key><UploadId>{id}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>")
        if "uploadId" in query:
            return self._upload(request.method, key, query, body)
        if request.method == "PUT":
            self.objects[key] = body
            return Response(headers={"ETag": '"e"'})
        return self._get(request, key)

    def _upload(self, method: str, key: str, query: dict[str, str], body: bytes) -> Response:
        id = query["uploadId"]
        if method == "PUT":
            self.uploads[id][int(query["partNumber"])] = body
            return Response(headers={"ETag": '"e"'})
        parts = self.uploads.pop(id)
        if method == "DELETE":
            return Response(status_code=204)
        self.objects[key] = b"".join(data for _, data in sorted(parts.items()))
        return _xml("<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>")

    def _get(self, request: Request, key: str) -> Response:
        data = self.objects.get(key)
        if data is None:
            return _xml("<Error><Code>NoSuchKey</Code></Error>", 404)
        head = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        if wanted is None:
            return Response(data, headers=head)
        start, end = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        head["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        return Response(data[start:end], 206, head)

    def _list(self, query: dict[str, str]) -> Response:
        prefix, after = query.get("prefix", ""), query.get("start-after", "")
        after = query.get("continuation-token", after)
        keys = sorted(k for k in self.objects if k.startswith(prefix) and k > after)
        page = keys[:3]
        rows = "".join(
            f"<Contents><Key>{escape(k)}</Key><LastModified>{_DATE}</LastModified><ETag>e</ETag>"
            f"<Size>{len(self.objects[k])}</Size></Contents>"
            for k in page
        )
        more = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if keys[3:] else ""
        truncated = "true" if keys[3:] else "false"
        return _xml(f"<ListBucketResult><IsTruncated>{truncated}</IsTruncated>{rows}{more}"
                    "</ListBucketResult>")  # fmt: skip


def _xml(text: str, status: int = 200) -> Response:
    text = f'<?xml version="1.0" encoding="UTF-8"?>{text}'
    return Response(text, status, media_type="application/xml")


@asynccontextmanager
async def s3() -> AsyncIterator[tuple[FakeS3, dict[str, str]]]:
    """A running one, and the options of a store that finds it."""
    fake = FakeS3()
    listener = bind("127.0.0.1", 0)
    options = {
        "aws_endpoint": f"http://127.0.0.1:{listener.getsockname()[1]}",
        "aws_region": "x",
        "aws_access_key_id": "a",
        "aws_secret_access_key": "b",
    }
    async with running(serve_asgi(fake, listener)):
        yield fake, options
