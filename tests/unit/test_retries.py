"""Where a job that failed at one backend goes next."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from common.cost import pricing
from common.jobs import Lease
from common.settings import BackendSettings, ModelSettings
from dispatcher.backend import Backend
from dispatcher.retries import elsewhere

URLS = ("http://e0:1", "http://e1:1", "http://e2:1")


def backends() -> dict[str, Backend]:
    return {url: Backend(BackendSettings(url=url), model="m1") for url in URLS}


def lease(job: str, url: str) -> Lease:
    return Lease(
        job=job, user="u", cls="standard", attempt=1, backend=url, charged=0.0,
        terms=pricing(ModelSettings()).terms(1, 1), weight=1.0, meta=b"", channel="", replica="",
        tries=1, arrival=0, deadline_ms=0, inflight=0, body=b"",
    )  # fmt: skip


def no_room(cls: str) -> Mapping[str, int]:
    return dict.fromkeys(URLS, 0)


def places(leases: list[Lease]) -> list[str]:
    return [one.backend[7:9] for one in leases]


def test_a_job_goes_to_a_backend_with_room_where_it_has_not_failed() -> None:
    known = backends()
    known[URLS[0]].health.refused(0, "a")
    known[URLS[1]].health.refused(0, "a")
    popped = [lease("a", URLS[0]), lease("b", URLS[2])]
    room = {URLS[0]: 5, URLS[1]: 5, URLS[2]: 2}
    assert places(elsewhere(popped, known, lambda cls: room)) == ["e2", "e2"]
    room[URLS[2]] = 1  # it is b's
    placed = elsewhere(popped, known, lambda cls: room)
    assert places(placed) == ["e2", "e0"], "b has not failed there"
    assert [one.job for one in placed] == ["a", "b"]


def test_where_one_backend_is_all_there_is_it_stays() -> None:
    known = backends()
    known[URLS[0]].health.refused(0, "a")
    popped = [lease("a", URLS[0]), lease("b", URLS[0])]
    placed = elsewhere(popped, known, no_room)
    assert placed == popped and placed[0] is popped[0], "not told to Redis again"


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=8),
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 2))),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
)
def test_no_place_is_lost_and_nobody_is_worse_off(
    at: list[int], failed: set[tuple[int, int]], room: list[int]
) -> None:
    known = backends()
    for job, url in failed:
        known[URLS[url]].health.refused(0, str(job))
    popped = [lease(str(n), URLS[url]) for n, url in enumerate(at)]
    spare = dict(zip(URLS, (r + at.count(n) for n, r in enumerate(room)), strict=True))
    placed = elsewhere(popped, known, lambda cls: spare)
    assert [one.job for one in placed] == [one.job for one in popped]
    for before, after in zip(popped, placed, strict=True):
        if after is not before:
            assert not known[after.backend].health.failed_here(after.job)
    for url in URLS:
        assert sum(one.backend == url for one in placed) <= spare[url]
