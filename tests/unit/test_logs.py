"""What log lines look like, and where they go."""

import logging
import re

import pytest

from common import logs


def test_log_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup("WARNING")
    logging.getLogger("fairlane.x").info("unheard")
    logging.getLogger("fairlane.x").warning("heard")
    logging.getLogger("httpx").info("unheard")
    logging.getLogger("uvicorn.error").warning("unheard: what a client did wrong")
    logging.getLogger("python_multipart.multipart").warning("unheard")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d WARNING fairlane\.x: heard\n", err)


def test_a_log_line_is_one_line_whatever_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs.setup()
    logging.getLogger("fairlane.x").info("%s: leading", "a\nb\r\x1b[2J\0\x85\u2028\u00fc \\n")
    _, err = capsys.readouterr()
    said = r"a\nb\r\x1b[2J\x00\x85\u2028" "\u00fc" r" \n: leading"
    assert err.endswith(f" INFO fairlane.x: {said}\n") and err.count("\n") == 1
    try:
        raise KeyError("x")
    except KeyError:
        logging.getLogger("fairlane.x").exception("failed")
    _, err = capsys.readouterr()
    assert "failed\nTraceback" in err and err.count("\n") > 3
