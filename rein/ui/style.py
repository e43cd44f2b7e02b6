"""What the pages load beside their text: style, scripts and Plotly, each read once and served from here."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import rein.report

HERE = Path(__file__).parent


@cache
def css() -> bytes:
    """The report's style, and what these pages add to it."""
    report = (Path(rein.report.__path__[0]) / "style.html").read_text(encoding="utf-8")
    inside = "\n".join(re.findall(r"<style[^>]*>(.*?)</style>", report, re.DOTALL))
    return (inside + (HERE / "ui.css").read_text(encoding="utf-8")).encode()


@cache
def script(name: str) -> bytes:
    return (HERE / name).read_bytes()


@cache
def plotly() -> bytes:
    from plotly.offline import get_plotlyjs  # takes a moment: only when curves are drawn

    return str(get_plotlyjs()).encode()
