"""Draw what a save costs against the number of ranks, ours and stock, from the results of ``coordinator.py``.

    python benchmarks/plot.py benchmarks/results/DATE/coordinator.json benchmarks/results/ranks.svg

Two panels with logarithmic axes, written as SVG by hand: payload a rank receives and sends, and CPU
seconds of the coordinator. A point is the median of its samples.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 340, 300, 62, 44, 52, 96
STOCK_COLOUR, OURS_COLOUR, OTHER_COLOUR = "#b3541e", "#1f5fa8", "#3f9b6b"


@dataclass(frozen=True)
class Line:
    label: str
    colour: str
    points: list[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    unit: Callable[[float], str]
    lines: list[Line]


def points_of(
    rows: list[dict[str, Any]], what: str, side: str, scale: float = 1.0
) -> list[tuple[float, float]]:
    found = [
        (row["facts"]["world_size"], scale * statistics.median(row[side]))
        for row in rows
        if row["what"] == what and row[side]
    ]
    return sorted((x, y) for x, y in found if y > 0)


def panels_of(rows: list[dict[str, Any]]) -> list[Panel]:
    payload = [
        Line("stock: received", STOCK_COLOUR, points_of(rows, "another rank receives, first save", "stock")),
        Line(
            "stock: sent",
            STOCK_COLOUR,
            points_of(rows, "another rank sends, first save", "stock"),
            dashed=True,
        ),
        Line("ours: received", OURS_COLOUR, points_of(rows, "another rank receives, first save", "ours")),
        Line(
            "ours: sent", OURS_COLOUR, points_of(rows, "another rank sends, first save", "ours"), dashed=True
        ),
        Line(
            "ours: received, unchanged save",
            OTHER_COLOUR,
            points_of(rows, "another rank receives, unchanged save", "ours"),
        ),
    ]
    cpu = [
        Line("stock", STOCK_COLOUR, points_of(rows, "coordinator, first save", "stock")),
        Line("ours, first save", OURS_COLOUR, points_of(rows, "coordinator, first save", "ours")),
        Line("ours, unchanged save", OTHER_COLOUR, points_of(rows, "coordinator, unchanged save", "ours")),
        Line(
            "stock: writer's finish",
            STOCK_COLOUR,
            points_of(rows, "writer's finish, first save", "stock"),
            dashed=True,
        ),
        Line(
            "ours: writer's finish",
            OURS_COLOUR,
            points_of(rows, "writer's finish, first save", "ours"),
            dashed=True,
        ),
    ]
    return [
        Panel("payload of a rank", show_bytes, payload),
        Panel("CPU of the coordinator", lambda value: f"{value:g} s", cpu),
    ]


def show_bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:g} {unit}"
        value /= 1000
    return f"{value:g} GB"


def draw(panels: list[Panel], caption: str) -> str:
    total_width = len(panels) * (LEFT + WIDTH + GAP)
    legend = 16 * max(len(panel.lines) for panel in panels)
    total_height = TOP + HEIGHT + BOTTOM + legend + 24
    size = f'viewBox="0 0 {total_width} {total_height}" font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f'<rect width="{total_width}" height="{total_height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += draw_panel(panel, number * (LEFT + WIDTH + GAP) + LEFT)
    parts.append(f'<text x="{LEFT}" y="{total_height - 8}" fill="#555">{escape(caption)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def draw_panel(panel: Panel, left: float) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    low_x, high_x = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))
    low_y = math.floor(math.log10(min(y for _, y in points)))
    high_y = math.ceil(math.log10(max(y for _, y in points)))

    def at(x: float, y: float) -> tuple[float, float]:
        right = (math.log2(x) - low_x) / max(high_x - low_x, 1)
        up = (math.log10(y) - low_y) / max(high_y - low_y, 1)
        return left + right * WIDTH, TOP + (1 - up) * HEIGHT

    parts = [f'<text x="{left}" y="{TOP - 18}" font-size="14">{escape(panel.title)}</text>']
    for power in range(low_y, high_y + 1):
        x, y = at(2**low_x, 10.0**power)
        parts.append(f'<path d="M{x:.1f} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        value = escape(panel.unit(10.0**power))
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    for size in sorted({x for x, _ in points}):
        x, y = at(size, 10.0**low_y)
        parts.append(f'<path d="M{x:.1f} {y:.1f}v5" stroke="#555"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 19:.1f}" text-anchor="middle">{size:,.0f}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">ranks</text>')
    for number, line in enumerate(panel.lines):
        if not line.points:
            continue
        style = f'stroke="{line.colour}" stroke-width="2"' + (
            ' stroke-dasharray="6 4"' if line.dashed else ""
        )
        placed = [at(x, y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{path}" fill="none" {style}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>' for x, y in placed]
        y = TOP + HEIGHT + BOTTOM + 4 + 16 * number
        parts.append(f'<path d="M{left} {y - 4}h26" fill="none" {style}/>')
        parts.append(f'<text x="{left + 34}" y="{y}">{escape(line.label)}</text>')
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+", help="coordinator.json, one or more")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    parser.add_argument("--world", default="moe-optimizer")
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.results]
    found = runs[0]
    rows = [row for run in runs for row in run["rows"] if row["facts"]["world"] == options.world]
    entries = rows[0]["facts"]["entries"]
    caption = (
        f"{options.world}, {entries:,} entries a rank; torch {found['versions']['torch']}, {found['date']}"
    )
    options.picture.write_text(draw(panels_of(rows), caption))


if __name__ == "__main__":
    main()
