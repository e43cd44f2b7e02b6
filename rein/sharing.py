"""Which rows of a micro-batch share their prompt: data cuts micro-batches by it, models pack by it.

Rows in, lists of row numbers out. Knows no model; whether one can share is the caller's word.
"""

from __future__ import annotations

from collections.abc import Sequence

from rein.types import TokenRow

PAYS_FROM = 16  # prompt tokens; of a shorter prompt, the second attention call costs more than it saves


def families(rows: Sequence[TokenRow]) -> list[list[int]]:
    """The rows that answer the same prompt together, in the order of each first; others alone."""
    found: dict[bytes | int, list[int]] = {}
    for i, row in enumerate(rows):
        key = row.prompt_ids.tobytes() if len(row.prompt_ids) >= PAYS_FROM else i
        found.setdefault(key, []).append(i)
    return list(found.values())
