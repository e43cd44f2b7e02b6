"""Useful floating-point operations of a pass over rows: what the maths needs, however it is computed.

Real tokens, the head at response positions alone; nothing off for a prompt that several rows share, nothing
on for what is computed again (checkpointing, chunks of the head). Norms, activations and the embedding's
look-up do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rein.models.load import trunk_of
from rein.types import TokenRow


class Flops:
    """Of one model with a head, `lm_head` or `score`.

    A matrix of k entries takes 2 k a token forward, 2 k for its input's gradient and 2 k for its own, where
    it is trained. Causal attention over L tokens takes 2 L^2 times heads times their width, and twice that
    backward.
    """

    def __init__(self, model: Any) -> None:
        head = getattr(model, "score", None) or model.get_output_embeddings()
        self.head, self.trained_head = _entries(head)
        self.trunk, self.trained_trunk = _entries(trunk_of(model))
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention: int = 2 * config.num_hidden_layers * config.num_attention_heads * width
        # Experts are read by some tokens only: what is useful there depends on the router.
        self.known = all(parameter.dim() < 3 for parameter in model.parameters())

    def forward(self, rows: Sequence[TokenRow]) -> float:
        tokens, squares, responses = _counts(rows)
        return 2.0 * self.trunk * tokens + 2.0 * self.head * responses + self.attention * squares

    def update(self, rows: Sequence[TokenRow]) -> float:
        """Forward and backward."""
        tokens, squares, responses = _counts(rows)
        trunk = 4.0 * self.trunk + 2.0 * self.trained_trunk
        head = 4.0 * self.head + 2.0 * self.trained_head
        return trunk * tokens + head * responses + 3.0 * self.attention * squares


def _counts(rows: Sequence[TokenRow]) -> tuple[int, int, int]:
    """Tokens, the sum of the squares of the rows' lengths, and response tokens."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    return sum(lengths), sum(n * n for n in lengths), sum(len(row.response_ids) for row in rows)


def _entries(module: nn.Module) -> tuple[int, int]:
    """Of the matrices that multiply: all, and those that are trained."""
    found = [
        parameter
        for part in module.modules()
        if not isinstance(part, nn.Embedding)
        for parameter in part.parameters(recurse=False)
        if parameter.dim() == 2
    ]
    return sum(p.numel() for p in found), sum(p.numel() for p in found if p.requires_grad)
