"""Prompts of an evaluation file in; which of the data's prompts are among them out.

A prompt is the same where its text or its ids are. Near copies are looked for in a sample of the data.
"""

from dataclasses import dataclass, field

import numpy as np

from rein.data.audit.block import Block, Side
from rein.data.audit.hashing import NONE, Keys
from rein.data.audit.numbers import Fact, share
from rein.types import Mask

EXAMPLES = 3
SHOWN = 200  # characters


@dataclass(slots=True)
class Overlap:
    """The evaluation prompts' keys, sorted, and the hits so far."""

    names: list[str]
    prompts: int  # different ones in the evaluation files
    text_keys: Keys
    ids_keys: Keys
    rows: int = 0
    examples: list[dict[str, str]] = field(default_factory=list)
    shared: list[Keys] = field(default_factory=list)

    def add(self, block: Block) -> None:
        side = block.prompt
        hits = np.flatnonzero(_among(side.text_key, self.text_keys) | _among(side.ids_key, self.ids_keys))
        if not hits.size:
            return
        self.rows += len(hits)
        self.shared.append(np.unique(side.key[hits]))
        for row in hits[: EXAMPLES - len(self.examples)].tolist():
            self.examples.append({"where": block.where(row), "prompt": _shown(side, row)})

    def facts(self, prompts: Keys) -> Fact:
        shared = len(np.unique(np.concatenate(self.shared))) if self.shared else 0
        return {
            "against": self.names,
            "against_prompts": self.prompts,
            "shared_prompts": shared,
            "shared_share": share(shared, len(np.unique(prompts))),
            "shared_rows": self.rows,
            "examples": self.examples,
        }


def overlap_with(names: list[str], blocks: list[tuple[Keys, Keys]]) -> Overlap:
    """From the (text, ids) keys of the evaluation prompts."""
    texts = np.concatenate([text for text, _ in blocks]) if blocks else np.zeros(0, np.uint64)
    ids = np.concatenate([ids for _, ids in blocks]) if blocks else np.zeros(0, np.uint64)
    distinct = len(np.unique(np.where(texts != NONE, texts, ids)))
    return Overlap(names, distinct, np.unique(texts[texts != NONE]), np.unique(ids[ids != NONE]))


def _among(keys: Keys, known: Keys) -> Mask:
    if not len(known):
        return np.zeros(len(keys), np.bool_)
    place = np.minimum(np.searchsorted(known, keys), len(known) - 1)
    return np.asarray(known[place] == keys)


def _shown(side: Side, row: int) -> str:
    content = side.content(row)
    if isinstance(content, str):
        return content[:SHOWN]
    return f"ids {content[:20].tolist()}"
