"""What the gate said of the model, for the page: each check with its number, its limit and how far apart.

Reads the dict that a summary and an export's manifest hold under `gate`. Knows no rule of the gate's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rein.errors import shown
from rein.report.figures import number, signed

LONGEST_WHY = 600  # characters

CHECKS = {  # name, how value and limit stand where it passes
    "min_score": ("Held-out score", "at least"),
    "min_lift_low": ("Lower end of the lift", "above"),
    "min_prompts": ("Prompts judged", "at least"),
    "max_kl": ("KL to the start, on the probe", "at most"),
    "max_length_ratio": ("Answers' length over the start's", "at most"),
    "max_format_drop": ("Fall of well-formed answers", "at most"),
    "max_repetition": ("Rise of repeated 4-grams", "at most"),
    "proxy_agrees": ("Proxy and truth agree", ""),
    "require_no_guard_stop": ("No guard ended the run", ""),
}


def section(gate: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The verdict in words and a row for each check; None where nothing is known."""
    if gate is None:
        return None
    if not gate["asked"]:
        why = shown(str(gate.get("note", "")), LONGEST_WHY)
        return {"verdict": "Not asked", "tone": "even", "said": why, "rows": []}
    rows = [_row(line) for line in gate["lines"]]
    failed = sum(not row["passed"] for row in rows)
    verdict, tone = ("Passed", "good") if not failed else ("Failed", "bad")
    many = f"{failed} of {len(rows)} checks failed"
    said = (
        f"All {len(rows)} checks passed." if not failed else f"{many}; nothing is exported unless by force."
    )
    if gate.get("forced"):
        said = f"{many}; exporting is forced, and the model card says so."
    return {"verdict": verdict, "tone": tone, "said": said, "rows": rows}


def _row(line: Mapping[str, Any]) -> dict[str, Any]:
    name, stands = CHECKS.get(line["check"], (line["check"], ""))
    value, limit = line["value"], line["limit"]
    known = isinstance(value, int | float) and isinstance(limit, int | float)
    return {
        "check": line["check"],
        "name": name,
        "value": number(value) if isinstance(value, int | float) else "–" if value is None else str(value),
        "limit": f"{stands} {number(limit)}".strip() if isinstance(limit, int | float) and stands else "–",
        "margin": signed(value - limit) if known and stands else "–",
        "passed": bool(line["passed"]),
        "why": "" if line["passed"] else shown(str(line["why"]), LONGEST_WHY),
    }
