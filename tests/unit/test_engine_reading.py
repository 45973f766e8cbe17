"""Where a metrics page is and whose: configured, recognised, recognised again."""

from pathlib import Path

import pytest

from dispatcher.engines.facts import NOTHING
from dispatcher.engines.kinds import ADAPTERS
from dispatcher.engines.reading import LOST, PATHS, Reading

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
VLLM = (FIXTURES / "vllm-0.32" / "metrics_under_load.body").read_bytes()
TGI = (FIXTURES / "tgi" / "metrics.txt").read_bytes()
PROMETHEUS = (FIXTURES / "trtllm" / "prometheus.txt").read_bytes()
ITERATIONS = (FIXTURES / "trtllm" / "iterations.json").read_bytes()
HTML = b"<html>login</html>\n"


class Server:
    """What is at which path; a path that is not there is missing."""

    def __init__(self, **pages: bytes) -> None:
        self.pages = {"/metrics": pages.get("metrics"), PATHS[1]: pages.get("prometheus")}
        self.asked: list[str] = []

    def poll(self, reading: Reading) -> bool:
        """Whether one poll told anything."""
        assert reading.path is not None
        self.asked.append(reading.path)
        page = self.pages[reading.path]
        if page is None:
            reading.missed()
            return False
        return reading.read(page, None) != NOTHING


def test_most_engines_are_asked_at_one_path_first() -> None:
    assert PATHS == ("/metrics", "/prometheus/metrics")


@pytest.mark.parametrize(("page", "kind"), [(VLLM, "vllm"), (TGI, "tgi")])
def test_an_engine_is_recognised_by_its_first_page(page: bytes, kind: str) -> None:
    reading, server = Reading("auto"), Server(metrics=page)
    assert reading.kind is None
    assert all(server.poll(reading) for _ in range(5))
    assert reading.kind == kind
    assert set(server.asked) == {"/metrics"}


def test_the_better_of_two_pages_is_found() -> None:
    reading, server = Reading("auto"), Server(metrics=ITERATIONS, prometheus=PROMETHEUS)
    assert all(server.poll(reading) for _ in range(4))
    assert reading.kind == "trtllm"
    assert server.asked == ["/metrics", *["/prometheus/metrics"] * 3]


def test_the_worse_of_two_pages_is_read_where_there_is_no_better() -> None:
    reading, server = Reading("auto"), Server(metrics=ITERATIONS)
    assert [server.poll(reading) for _ in range(5)] == [True, False, True, True, True]
    server = Server(metrics=ITERATIONS)
    assert [server.poll(Reading("trtllm")) for _ in range(1)] == [False]


def test_an_idle_engine_s_empty_list_is_recognised_and_tells_nothing() -> None:
    reading, server = Reading("auto"), Server(metrics=b"[]")
    assert not any(server.poll(reading) for _ in range(10))
    assert reading.kind == "trtllm"
    server.pages["/metrics"] = ITERATIONS
    assert any(server.poll(reading) for _ in range(2))


def test_a_page_of_no_known_engine_is_one_without_metrics_that_is_still_looked_at() -> None:
    reading, server = Reading("auto"), Server(metrics=HTML)
    server.poll(reading)
    assert reading.kind == "none"
    for _ in range(9):
        assert not server.poll(reading)
    assert set(server.asked) == set(PATHS)
    server.pages["/metrics"] = VLLM
    assert any(server.poll(reading) for _ in range(2))
    assert reading.kind == "vllm"


def test_without_any_page_nothing_is_known_of_the_kind() -> None:
    reading, server = Reading("auto"), Server()
    assert not any(server.poll(reading) for _ in range(9))
    assert reading.kind is None


@pytest.mark.parametrize("page", [TGI, b"[]"])
def test_another_engine_behind_the_same_url_is_recognised_at_once(page: bytes) -> None:
    reading, server = Reading("auto"), Server(metrics=VLLM)
    server.poll(reading)
    server.pages["/metrics"] = page
    server.poll(reading)
    assert reading.kind == ("tgi" if page == TGI else "trtllm")


def test_another_engine_at_another_path_is_found() -> None:
    reading, server = Reading("auto"), Server(metrics=VLLM)
    server.poll(reading)
    server.pages = {"/metrics": None, "/prometheus/metrics": PROMETHEUS}
    assert any(server.poll(reading) for _ in range(LOST + 2))
    assert reading.kind == "trtllm"


def test_a_page_that_fails_a_few_times_is_asked_for_where_it_was() -> None:
    reading, server = Reading("auto"), Server(prometheus=PROMETHEUS)
    while not server.poll(reading):
        pass
    for fault in (None, HTML):
        server.pages["/prometheus/metrics"] = fault
        for _ in range(LOST - 1):
            server.poll(reading)
        assert reading.kind == "trtllm"
        server.pages["/prometheus/metrics"] = PROMETHEUS
        assert server.poll(reading)
    assert set(server.asked[1:]) == {"/prometheus/metrics"}


def test_a_page_that_makes_no_sense_for_long_is_no_engine_s() -> None:
    reading, server = Reading("auto"), Server(metrics=VLLM)
    server.poll(reading)
    server.pages["/metrics"] = HTML
    for _ in range(LOST):
        assert reading.kind == "vllm"
        server.poll(reading)
    assert reading.kind == "none"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_a_configured_kind_is_never_another(kind: str) -> None:
    reading, server = Reading(kind), Server(metrics=VLLM, prometheus=VLLM)
    told = [server.poll(reading) for _ in range(12)]
    assert reading.kind == kind
    assert set(server.asked) == set(ADAPTERS[kind].paths)
    assert all(told) if kind == "vllm" else not any(told)


def test_an_engine_without_metrics_is_not_asked() -> None:
    reading = Reading("none")
    assert (reading.path, reading.kind) == (None, "none")
