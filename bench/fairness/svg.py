"""Pictures of a run as SVG, drawn by hand: no packages, and the same text for the same figures.

A picture has columns, a column has panels one above the other with the same axes, a panel has
series. It has a background of its own, so it is legible on a light page and on a dark one.
"""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

import msgspec

INK, FAINT, GRID, PAPER = "#1f2328", "#59636e", "#dfe3e8", "#ffffff"
BLUE, ORANGE, GREEN = "#0969da", "#e07b00", "#1a7f37"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, sans-serif"
PANEL_W, PANEL_H = 400.0, 180.0
LEFT, RIGHT, TOP, BETWEEN, BOTTOM = 62.0, 24.0, 84.0, 48.0, 54.0
DOT, PAD = 2.6, 8.0
LEGEND_Y, CHAR_W = 46.0, 6.6
TICKS = 6


class Series(msgspec.Struct, frozen=True):
    """Points of one colour, as dots or joined by a line."""

    name: str
    color: str
    points: Sequence[tuple[float, float]]
    line: bool = False


class Mark(msgspec.Struct, frozen=True):
    """A dashed line across a panel, and what it says."""

    y: float
    text: str
    color: str = FAINT


class Panel(msgspec.Struct, frozen=True):
    """One diagram."""

    title: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """Diagrams with the same axes, one above the other."""

    title: str
    x_label: str
    x_max: float
    y_min: float
    y_max: float
    y_ticks: Sequence[tuple[float, str]]
    panels: Sequence[Panel]
    log: bool = False

    def x(self, value: float) -> float:
        """Points from the panel's left edge; values outside are at the edge."""
        return PAD + (PANEL_W - 2 * PAD) * min(1.0, max(0.0, value / self.x_max))

    def y(self, value: float) -> float:
        """Points from the panel's top edge, likewise."""
        low, high, at = self.y_min, self.y_max, min(self.y_max, max(self.y_min, value))
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(at)
        return PANEL_H * (1 - (at - low) / (high - low))


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Powers of ten from `low` to `high`, in seconds."""
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    return [(10.0**n, f"{10.0**n:g} s") for n in powers]


def step(x_max: float) -> float:
    """Distance of the ticks on the x axis: 1, 2 or 5 times a power of ten."""
    rough = x_max / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough * 0.999)


def picture(columns: Sequence[Column]) -> str:
    """The whole document. Raises ValueError where there is nothing to show."""
    if not columns or not all(c.panels for c in columns):
        raise ValueError("a picture needs columns, and each of them panels")
    rows = max(len(c.panels) for c in columns)
    width = len(columns) * (LEFT + PANEL_W + RIGHT)
    height = TOP + rows * (PANEL_H + BETWEEN) - BETWEEN + BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{FONT}" font-size="12" '
        f'fill="{INK}" role="img">',
        f"<title>{escape('; '.join(c.title for c in columns))}</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{PAPER}"/>',
    ]
    for number, column in enumerate(columns):
        left = number * (LEFT + PANEL_W + RIGHT) + LEFT
        parts += _column(column, left)
    return "\n".join([*parts, "</svg>", ""])


def _column(column: Column, left: float) -> list[str]:
    parts = [_text(left, 24, column.title, 'font-size="14" font-weight="600"'),
             *_legend(column, left)]  # fmt: skip
    top = TOP
    for number, panel in enumerate(column.panels):
        top = TOP + number * (PANEL_H + BETWEEN)
        parts += _panel(column, panel, left, top)
    label = _text(left + PANEL_W / 2, top + PANEL_H + 36, column.x_label,
                  f'text-anchor="middle" fill="{FAINT}"')  # fmt: skip
    return [*parts, label]


def _legend(column: Column, left: float) -> list[str]:
    parts, at = [], left
    shown = {s.name: s.color for p in column.panels for s in p.series}
    for name, color in shown.items():
        parts.append(f'<circle cx="{at + 5:.1f}" cy="{LEGEND_Y - 4:g}" r="5" fill="{color}"/>')
        parts.append(_text(at + 14, LEGEND_Y, name, f'fill="{FAINT}"'))
        at += 14 + CHAR_W * len(name) + 18
    return parts


def _panel(column: Column, panel: Panel, left: float, top: float) -> list[str]:
    parts = [_text(left, top - 7, panel.title, 'font-weight="600"')]
    for value, text in column.y_ticks:
        y = top + column.y(value)
        parts.append(_line(left, y, left + PANEL_W, y, GRID))
        parts.append(_text(left - 8, y + 4, text, f'text-anchor="end" fill="{FAINT}"'))
    gap = step(column.x_max)
    for n in range(math.floor(column.x_max / gap + 1e-9) + 1):
        x = left + column.x(n * gap)
        parts.append(_line(x, top + PANEL_H, x, top + PANEL_H + 4, FAINT))
        parts.append(
            _text(x, top + PANEL_H + 17, f"{n * gap:g}", f'text-anchor="middle" fill="{FAINT}"')
        )
    for series in panel.series:
        parts += _series(column, series, left, top)
    for mark in panel.marks:
        y = top + column.y(mark.y)
        parts.append(_line(left, y, left + PANEL_W, y, mark.color, 'stroke-dasharray="5 4"'))
        parts.append(
            _text(left + PANEL_W - 4, y - 5, mark.text,
                  f'text-anchor="end" font-weight="600" fill="{mark.color}" '
                  f'stroke="{PAPER}" stroke-width="3" paint-order="stroke"')
        )  # fmt: skip
    parts.append(_line(left, top + PANEL_H, left + PANEL_W, top + PANEL_H, FAINT))
    return parts


def _series(column: Column, series: Series, left: float, top: float) -> list[str]:
    points = [
        f"{left + column.x(x):.1f},{top + column.y(y):.1f}"
        for x, y in series.points
        if not math.isnan(y)
    ]
    if series.line:
        path = "M" + " L".join(points) if points else ""
        return [f'<path d="{path}" fill="none" stroke="{series.color}" stroke-width="2.5"/>']
    dots = (point.split(",") for point in points)
    circles = [f'<circle cx="{x}" cy="{y}" r="{DOT:g}"/>' for x, y in dots]
    return [f'<g fill="{series.color}" fill-opacity="0.75">', *circles, "</g>"]


def _line(x: float, y: float, to_x: float, to_y: float, color: str, more: str = "") -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{color}" {more}/>'
    )


def _text(x: float, y: float, text: str, more: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{escape(text)}</text>'
