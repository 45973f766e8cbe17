"""The admission benchmark's own arithmetic and pictures."""

import math
import xml.etree.ElementTree as ET

import pytest

from bench.admission.__main__ import MEASURES, drawn, part
from bench.admission.stage import TOKEN_TIMES, WAITING, Look, Side, look, plays
from bench.crowd import GENERATED, RUNNING
from bench.fleet import config
from bench.setup import Setup

PAGE = {WAITING: 3.0, RUNNING: 4.0, GENERATED: 100.0, TOKEN_TIMES + "_sum": 5.0,
        TOKEN_TIMES + "_count": 100.0}  # fmt: skip
LATER = {**PAGE, GENERATED: 150.0, TOKEN_TIMES + "_sum": 7.0, TOKEN_TIMES + "_count": 150.0}


def test_a_look_is_what_came_between_two_readings() -> None:
    assert look(PAGE, LATER, 10.0, 12.0) == Look(12.0, 3.0, 4.0, 25.0, pytest.approx(40.0))
    first = look({}, PAGE, 10.0, 12.0)
    assert first.tokens_per_s == 0 and math.isnan(first.tpot_ms), "since when is not known"
    dead = look(PAGE, {}, 10.0, 12.0)
    assert dead.tokens_per_s == 0 and math.isnan(dead.waiting)


def test_each_play_has_a_picture_with_all_measures_of_all_sides() -> None:
    looks = [Look(n / 2, n, n, 10.0 * n, 20.0 + n) for n in range(9)] + [look({}, {}, 4.0, 4.5)]
    for play in plays(quick=True):
        sides = [Side(s, [looks] * len(play.engines), {"x": 1}, [1.0, 2.0]) for s in play.sides]
        svg = ET.fromstring(drawn(play, sides))
        text = "".join(svg.itertext())
        assert all(title in text for title in MEASURES.values())
        lines = [e for e in svg.iter() if e.tag.endswith("path")]
        assert len(lines) == len(MEASURES) * len(play.sides) * len(play.engines)
        assert ("tpot_ms" in text) is (play.tpot_ms is not None)


def test_figures_are_of_all_engines_of_a_side() -> None:
    looks = [[Look(n, n, 1.0, 10.0, 20.0) for n in range(100)] for _ in range(2)]
    made = part(plays(quick=True)[0], [Side("direct", looks, {"status 503": 2}, [1.0])])
    value = {f.name: f.value for f in made.figures}
    assert value["direct: output tokens"] == 20.0
    assert value["direct: waiting in an engine, p95"] == pytest.approx(94, abs=1)
    assert "direct: 2 requests: status 503" in made.notes


def test_the_target_is_in_the_configuration() -> None:
    assert "tpot_ms = 30.0" in config(["http://e"], Setup(tpot_ms=30.0))
    assert "tpot_ms" not in config(["http://e"], Setup())
