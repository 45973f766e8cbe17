"""Texts and lengths of the simulated engine."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.text import WORDS, count_tokens, drawn_length, expected_text, plan_length


def test_words_are_countable() -> None:
    assert len(WORDS) == len(set(WORDS)) == 64
    assert not any(" " in word or not word for word in WORDS)
    assert any(len(word.encode()) > len(word) for word in WORDS)


@given(seed=st.integers(), content=st.text(max_size=20), n=st.integers(0, 40))
def test_a_text_has_as_many_tokens_as_words(seed: int, content: str, n: int) -> None:
    tokens = expected_text(seed, content, n)
    assert len(tokens) == count_tokens("".join(tokens)) == n
    assert tokens == expected_text(seed, content, n + 3)[:n]


def test_texts_differ_by_seed_and_content() -> None:
    texts = {"".join(expected_text(seed, c, 12)) for seed in range(20) for c in "abcdefgh"}
    assert len(texts) == 160


def test_lengths_have_the_mean_and_vary() -> None:
    lengths = [drawn_length(3, str(i), 100) for i in range(4_000)]
    assert statistics.mean(lengths) == pytest.approx(100, rel=0.06)
    assert statistics.stdev(lengths) == pytest.approx(100, rel=0.1)
    assert min(lengths) >= 1


@pytest.mark.parametrize(
    ("drawn", "limit", "least", "endless", "wanted"),
    [
        (5, 10, 0, False, (5, "stop")),
        (10, 10, 0, False, (10, "length")),
        (50, 10, 0, False, (10, "length")),
        (5, 10, 0, True, (10, "length")),
        (5, 10, 7, False, (7, "stop")),
        (5, 10, 10, False, (10, "length")),
        (-3, 10, 0, False, (1, "stop")),
    ],
)
def test_plan(drawn: int, limit: int, least: int, endless: bool, wanted: tuple[int, str]) -> None:
    assert plan_length(drawn, limit, least, endless) == wanted
