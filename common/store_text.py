"""Errors of the object store as one line for people. Pure."""

import re

NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
"""In the error of an object that is not there."""
_QUERY = re.compile(r"\?\S+")
"""Of a URL in an error; Azure's has secrets."""
_METADATA = "http://169.254.169.254/"
"""Where a cloud's machine asks who it is, once no credentials are found elsewhere."""
_NO_CREDENTIALS = (
    "no credentials for the store: there are none in store.options and in the environment, and "
    "this machine is given none by a cloud"
)


def error_text(e: BaseException) -> str:
    """The first line of an error, without what follows a URL's question mark."""
    if NO_BUCKET.search(str(e)):
        return "the bucket is not there"
    line = (str(e).splitlines() or [""])[0]
    if _METADATA in line:
        return _NO_CREDENTIALS
    return _QUERY.sub("?…", f"{type(e).__name__}: {line}")[:500]
