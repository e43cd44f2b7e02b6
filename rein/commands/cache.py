"""`rein cache ls|prune`: what frozen models said, as it is kept for all runs; and making room.

Reads the folder that the recipe's `cache` names. Removes only what data/cache.py has made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rein.config import paths
from rein.config.recipe import Recipe
from rein.data.cache_entries import Entry, chosen, entries, remove
from rein.errors import ConfigError
from rein.tracking.console import Console

KINDS = {
    "ref_log_probs": "reference log-probs",
    "behavior_log_probs": "recomputed behavior log-probs",
    "score": "reward-model scores",
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_DAY = 86400.0


def run(
    action: str,
    recipe: Recipe,
    console: Console,
    *,
    older_than: str | None,  # days
    max_size: str | None,
    everything: bool,
    dry_run: bool,
) -> None:
    """List the entries, or remove some of them. Raises ConfigError for a prune that says not what."""
    folder, now = paths.cache_dir(recipe), time.time()
    found = entries(folder)
    if action == "ls":
        if older_than or max_size or everything or dry_run:
            raise ConfigError("rein cache ls: takes no option; write rein cache prune with it")
        _say(console, found, now, "")
        there = folder.is_dir()
        console.say(f"{folder}: {_total(found) if there else 'no such folder, so nothing is kept there'}")
        return
    if not (older_than or max_size or everything):
        raise ConfigError("rein cache prune: says not what; give --older-than DAYS, --max-size SIZE or --all")
    gone = chosen(
        found,
        now=now,
        older_than=None if older_than is None else _days(older_than) * _DAY,
        max_size=None if max_size is None else size_of(max_size),
        everything=everything,
    )
    _say(console, gone, now, "would remove " if dry_run else "removed ")
    for entry in gone if not dry_run else ():
        remove(entry)
    left = [entry for entry in found if entry not in gone]
    stay = "would stay" if dry_run else "stay"
    console.say(f"{folder}: {_total(gone)} {'to remove' if dry_run else 'removed'}, {_total(left)} {stay}")


def _say(console: Console, found: Sequence[Entry], now: float, verb: str) -> None:
    for entry in found:
        days = int((now - entry.used) / _DAY)
        ago = "today" if days < 1 else f"{days} day{'s' * (days > 1)} ago"
        kind = KINDS.get(entry.kind, entry.kind)
        model = entry.about.get("model", "a model")
        facts = [f"weights {entry.key.get('weights', '?')[:8]}", entry.key.get("numeric path", "?")]
        size = f"{entry.rows:,} rows, {bytes_in_words(entry.bytes)}"
        console.say(f"{verb}{kind} of {model} ({', '.join(facts)}): {size}, last used {ago}")


def _total(found: Sequence[Entry]) -> str:
    many = "entry" if len(found) == 1 else "entries"
    return f"{len(found)} {many}, {bytes_in_words(sum(entry.bytes for entry in found))}"


def bytes_in_words(size: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}" if unit != "bytes" else f"{size:.0f} bytes"
        size /= 1024
    return f"{size:.3g} TiB"


def size_of(text: str) -> int:
    """Bytes of "10GB", "500M" or "0"; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"rein cache prune: --max-size={text}; give a size such as 10GB or 500M")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        days = -1.0
    if not 0 <= days < float("inf"):
        raise ConfigError(f"rein cache prune: --older-than={text}; give a number of days, such as 30")
    return days
