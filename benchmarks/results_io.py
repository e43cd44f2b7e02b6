"""How every benchmark writes what it found: `results/<name>.json` for machines, a readable `.md` beside."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rein.manifest import versions

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """What the numbers were made on."""
    cpu = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gb": round(int(memory) / 2**20, 1)}


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def write(name: str, settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], text: str) -> None:
    """Both files, with versions and machine; `text` is the Markdown body under the title."""
    RESULTS.mkdir(exist_ok=True)
    made_on = {"versions": versions(), "machine": machine()}
    body = {"name": name, **made_on, "settings": dict(settings), "rows": list(rows)}
    (RESULTS / f"{name}.json").write_text(json.dumps(body, indent=1) + "\n")
    below = ", ".join(f"{key} {value}" for key, value in (made_on["versions"] | made_on["machine"]).items())
    (RESULTS / f"{name}.md").write_text(f"# {name}\n\n{text.strip()}\n\nMade with {below}.\n")


def into_page(name: str, text: str) -> None:
    """Put `text` between a page's `<!-- name -->` marks, so that its numbers are the script's."""
    root = Path(__file__).parent.parent
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        before, start, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
        if start:
            _, end, after = rest.partition(f"<!-- /{name} -->")
            page.write_text(f"{before}{start}{text.strip()}\n{end}{after}", encoding="utf-8")
            return
    raise SystemExit(
        f"README.md and docs: none has the marks <!-- {name} -->; write them where the table belongs"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines)
