"""A batch as OpenAI's API shows it."""

import openai.types
import pytest

from common.batch_state import OVER, About, State, read_state, shown

ABOUT = About(
    id="batch_" + "ab" * 16, owner="u", user="u", weight=1.0, cls="standard", models=[],
    key_jobs=1, endpoint="/v1/embeddings", input_file_id="file-1", window="24h",
    window_ms=86_400_000, created_ms=1_700_000_000_500,
)  # fmt: skip


def test_a_new_one() -> None:
    made = shown(ABOUT, State())
    assert made["status"] == "validating" and made["object"] == "batch"
    assert made["created_at"] == 1_700_000_000
    assert made["expires_at"] == 1_700_086_400
    assert made["request_counts"] == {"total": 0, "completed": 0, "failed": 0}
    for name in ("errors", "output_file_id", "error_file_id", "completed_at", "metadata", "model"):
        assert made[name] is None


@pytest.mark.parametrize(
    "status", [*sorted(OVER), "validating", "in_progress", "finalizing", "cancelling"]
)
def test_the_official_client_reads_each(status: str) -> None:
    state = State(
        status=status, total=3, completed=2, failed=1, output_file_id="o", error_file_id="e",
        errors=[{"code": "c", "message": "m", "param": None, "line": 1}], times={"failed_at": 5},
    )  # fmt: skip
    batch = openai.types.Batch.model_validate(shown(ABOUT, state), strict=True)
    assert batch.status == status and batch.failed_at == 5
    assert (batch.output_file_id == "o") == (status in OVER), "shown once it is written"
    assert batch.errors is not None and batch.errors.data is not None
    assert batch.errors.data[0].line == 1


def test_read_from_its_hash() -> None:
    fields = {
        "status": b"in_progress", "total": b"9", "completed": b"3", "failed": b"1", "cursor": b"5",
        "in_progress_at": b"17", "errors": b'[{"code":"c"}]', "runner": b"w", "about": b"\xff",
    }  # fmt: skip
    state = read_state(fields)
    assert (state.status, state.total, state.left, state.cursor) == ("in_progress", 9, 5, 5)
    assert state.times == {"in_progress_at": 17} and state.errors == [{"code": "c"}]
    assert not state.over and read_state({"status": b"expired"}).over


def test_names_that_become_parts_of_keys() -> None:
    assert ABOUT.sink == "b-" + "ab" * 16
