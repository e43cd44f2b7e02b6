"""A figure of panels as one SVG file: dots, lines, texts; axes and ticks are the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
          "#17becf", "#111111")  # fmt: skip
FONT = 'font-family="sans-serif" font-size="12"'


class Panel:
    """Axes in a box of the figure; x and y are in the data's units."""

    def __init__(
        self,
        box: tuple[float, float, float, float],  # left, top, width, height
        x: tuple[float, float],
        y: tuple[float, float],
        title: str = "",
    ) -> None:
        self.left, self.top, self.width, self.height = box
        self.x_ends, self.y_ends = x, y
        self.parts: list[str] = []
        self.parts.append(
            f'<rect x="{self.left}" y="{self.top}" width="{self.width}" height="{self.height}" '
            'fill="none" stroke="#999"/>'
        )
        self.text(title, self.left + self.width / 2, self.top - 8, anchor="middle")

    def x(self, value: float) -> float:
        low, high = self.x_ends
        return self.left + (value - low) / (high - low) * self.width

    def y(self, value: float) -> float:
        low, high = self.y_ends
        return self.top + self.height - (value - low) / (high - low) * self.height

    def text(self, words: str, x: float, y: float, *, anchor: str = "start", color: str = "#111") -> None:
        """At a place of the figure, not of the data."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(words)}</text>'
        )

    def x_ticks(self, ticks: Sequence[tuple[float, str]]) -> None:
        for value, name in ticks:
            self.line([(value, self.y_ends[0]), (value, self.y_ends[1])], "#e5e5e5", dots=False)
            self.text(name, self.x(value), self.top + self.height + 16, anchor="middle")

    def y_ticks(self, ticks: Sequence[tuple[float, str]]) -> None:
        for value, name in ticks:
            self.line([(self.x_ends[0], value), (self.x_ends[1], value)], "#e5e5e5", dots=False)
            self.text(name, self.left - 6, self.y(value) + 4, anchor="end")

    def line(
        self, points: Sequence[tuple[float, float]], color: str, *, dots: bool = True, wide: float = 1.5
    ) -> None:
        places = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="{wide}"/>')
        if dots:
            for x, y in points:
                self.dot(x, y, color)

    def dot(self, x: float, y: float, color: str, *, hollow: bool = False) -> None:
        fill = "white" if hollow else color
        self.parts.append(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3.5" fill="{fill}" stroke="{color}"/>'
        )


def write(path: Path, size: tuple[int, int], panels: Sequence[Panel]) -> None:
    width, height = size
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {FONT}>'
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    body = "\n".join(part for panel in panels for part in panel.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{head}\n{back}\n{body}\n</svg>\n")
