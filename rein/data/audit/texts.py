"""What should not stand in text: other models' special tokens, marks of a broken encoding, nothing at all.

A template writes special tokens; found in the text itself, they are read as the template's, or double it.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from rein.data.audit.block import Side

SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "<<SYS>>", "<</SYS>>", "<start_of_turn>", "<end_of_turn>"),
    *("<bos>", "<eos>", "<pad>", "<unk>", "[BOS]", "[EOS]", "[PAD]", "[UNK]", "[CLS]", "[SEP]"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
)
REPLACEMENT = "�"


@dataclass(slots=True)
class TextScan:
    """Rows of one side whose text holds what it should not."""

    tokens: tuple[str, ...]
    rows: int = 0  # that have text
    special: Counter[str] = field(default_factory=Counter)  # token -> rows
    with_special: int = 0
    replaced: int = 0
    blank: int = 0  # white space only
    _pattern: str = ""

    def __post_init__(self) -> None:
        self._pattern = "|".join(re.escape(token) for token in self.tokens)

    def add(self, side: Side) -> None:
        array = side.texts
        if not len(array):
            return
        of = np.arange(len(array)) if side.text_rows is None else side.text_rows
        self.rows += len(np.unique(of)) if side.text_rows is not None else len(array)
        lengths = pc.binary_length(pc.utf8_trim_whitespace(array)).to_numpy(zero_copy_only=False)
        self.blank += len(np.unique(of)) - len(np.unique(of[lengths > 0]))
        self.replaced += _rows(array, of, REPLACEMENT)
        hits = np.flatnonzero(np.asarray(pc.match_substring_regex(array, self._pattern)))
        if hits.size:
            found, rows = array.take(pa.array(hits)), of[hits]
            self.with_special += len(np.unique(rows))
            self.special.update({t: n for t in self.tokens if (n := _rows(found, rows, t))})


def tokens_of(own: Iterable[str]) -> tuple[str, ...]:
    """The special tokens to look for: everybody's, and the tokenizer's own."""
    return tuple(dict.fromkeys((*own, *SPECIAL)))


def _rows(array: pa.Array, of: NDArray[np.int64], what: str) -> int:
    return len(np.unique(of[np.asarray(pc.match_substring(array, what))]))
