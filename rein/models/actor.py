"""The policy over packed rows: log-probs, entropies and exact divergences of stored responses.

R counts response tokens. The logits of a pack are never held at once: log-probs alone come from head.py; with
an entropy or a KL the head runs in chunks of positions, each made again for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rein.errors import CheckpointError
from rein.functional.log_probs import entropy_of, exact_kl, log_probs_of
from rein.models.head import TILE, head_log_probs, plain_head
from rein.models.load import (
    head_function,
    load_causal_lm,
    load_tokenizer,
    model_folder,
    stop_ids,
    trunk_of,
)
from rein.models.lora import make_trainable
from rein.models.packing import Packed
from rein.models.place import CPU, Place
from rein.models.precision import is_fast, set_precision
from rein.models.save import save_folder
from rein.models.trunk import Whole, run_trunk, shares_prompts
from rein.models.ulysses import Slices
from rein.models.vocabulary import grow_to
from rein.protocols import Reference, Tokenizer
from rein.types import TokenRow

CHUNK_LOGITS = 2**24  # entries of [positions, V] held at once, unless given


class Actor:
    """A causal LM read at the states before its response tokens."""

    def __init__(
        self, model: Any, tokenizer: Tokenizer, path: str, *, logits_chunk: int = CHUNK_LOGITS
    ) -> None:
        self.model = model
        self.logits_chunk = logits_chunk
        self.tokenizer = tokenizer
        self.path = path
        self.stop_ids = stop_ids(path, tokenizer)
        self.head, self.plain_head = head_function(model), plain_head(model)
        weight = model.get_output_embeddings().weight
        self.vocabulary, self.dtype = int(weight.shape[0]), weight.dtype
        self.device = next(model.parameters()).device
        self.shares_prompts = shares_prompts(model)
        self.whole = Whole(model)
        self.slices: Slices | None = None  # the ranks that share a pack's positions

    def hidden(self, rows: Sequence[TokenRow]) -> tuple[Packed, Tensor]:
        """The pack and the last hidden states before each response token, [R, H]."""
        found: tuple[Packed, Tensor] = self.whole(self.hidden_within, rows)
        return found

    def hidden_within(self, rows: Sequence[TokenRow]) -> tuple[Packed, Tensor]:
        """The same amid another pass of this model."""
        packed, states = run_trunk(self, rows, slices=self.slices)
        return packed, states.index_select(0, packed.states).to(self.dtype)

    def log_probs(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,  # [B]
        *,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """log pi(token | before) and, if asked, each position's entropy, [B, T]; 0 past a row's end."""
        found = self.whole(self._read, rows, temperature, entropy=entropy)
        return found[0], found[1] if entropy else None

    def log_probs_and_kl(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,  # [B]
        reference: Reference,
        *,
        entropy: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """What log_probs says, and KL(actor || reference) over the vocabulary, [B, T], in nats."""
        found = self.whole(self._read, rows, temperature, entropy=entropy, reference=reference)
        return found[0], found[1] if entropy else None, found[-1]

    def _read(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,
        *,
        entropy: bool,
        reference: Reference | None = None,
    ) -> list[Tensor]:
        # First, for it may switch this model's adapters off and on.
        beside = () if reference is None else (reference.hidden(rows),)
        packed, hidden = self.hidden_within(rows)
        per_token = temperature.to(hidden).index_select(0, packed.row)
        if self.plain_head is not None and not entropy and reference is None:
            return [packed.spread(self._of_plain_head(hidden / per_token.unsqueeze(1), packed.targets))]

        def chunk(states: Tensor, ids: Tensor, temp: Tensor, *ref_states: Tensor) -> Tensor:
            logits = self.head(states)
            columns = [log_probs_of(logits, ids, temp)]
            if entropy:
                columns.append(entropy_of(logits, temp))
            if reference is not None:
                columns.append(exact_kl(logits, reference.logits(*ref_states), temp))
            return torch.stack(columns)

        found = self._chunked(chunk, hidden, packed.targets, per_token, *beside)
        return [packed.spread(values) for values in found]

    @torch.no_grad()
    def exact_kl(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,  # [B]
        ref_hidden: Tensor,  # [R, H]  of the reference on the same rows
        ref_head: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        """KL(actor || reference) over the vocabulary and the actor's entropy, [B, T] each, nats per token."""
        kl, entropy = self.whole(self._exact_kl, rows, temperature, ref_hidden, ref_head)
        return kl, entropy

    def _exact_kl(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,
        ref_hidden: Tensor,
        ref_head: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        packed, hidden = self.hidden_within(rows)
        per_token = temperature.to(hidden).index_select(0, packed.row)

        def chunk(states: Tensor, reference: Tensor, temp: Tensor) -> Tensor:
            logits = self.head(states)
            return torch.stack([exact_kl(logits, ref_head(reference), temp), entropy_of(logits, temp)])

        kl, entropy = self._chunked(chunk, hidden, ref_hidden, per_token)
        return packed.spread(kl), packed.spread(entropy)

    @torch.no_grad()
    def over_logits(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,  # [B]
        compute: Callable[
            [Tensor, Tensor, Tensor], Tensor
        ],  # logits [r, V], ids [r], temperature [r] -> [K, r]
    ) -> Tensor:
        """Whatever `compute` makes of the logits before each response token, a chunk at a time, [K, B, T]."""
        found: Tensor = self.whole(self._over_logits, rows, temperature, compute)
        return found

    def _over_logits(
        self,
        rows: Sequence[TokenRow],
        temperature: Tensor,
        compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        packed, hidden = self.hidden_within(rows)
        per_token = temperature.to(hidden).index_select(0, packed.row)

        def chunk(states: Tensor, ids: Tensor, temp: Tensor) -> Tensor:
            return compute(self.head(states), ids, temp)

        found = self._chunked(chunk, hidden, packed.targets, per_token)
        return torch.stack([packed.spread(values) for values in found])

    def _of_plain_head(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Log-probs alone, the most frequent wish, [R]."""
        assert self.plain_head is not None
        return head_log_probs(
            hidden,
            self.plain_head,
            ids,
            entries=self.logits_chunk,
            precision="medium" if is_fast(self.model) else torch.get_float32_matmul_precision(),
        )

    def _chunked(self, chunk: Callable[..., Tensor], hidden: Tensor, *rest: Tensor) -> Tensor:
        entries = self.logits_chunk
        if hidden.device.type == "cpu" and not torch.is_grad_enabled():  # no gradient is summed by chunks
            entries = min(entries, TILE)
        size = max(entries // self.vocabulary, 1)
        if len(hidden) <= size:
            return chunk(hidden, *rest)
        parts = []
        for begin in range(0, len(hidden), size):
            piece = [tensor[begin : begin + size] for tensor in (hidden, *rest)]
            if torch.is_grad_enabled():
                parts.append(checkpoint(chunk, *piece, use_reentrant=False))
            else:
                parts.append(chunk(*piece))
        return torch.cat(parts, dim=1)

    def save(self, path: Path) -> None:
        """A plain Hugging Face folder, adapters fused in."""
        save_folder(self.model, self.tokenizer, path, start=self.path)


def load_actor(
    path: str,
    *,
    dtype: str = "float32",
    precision: str = "exact",
    lora_rank: int = 0,
    lora_alpha: float = 16,
    target_modules: str | list[str] = "all-linear",
    enable_gradient_checkpointing: bool = False,
    logits_chunk: int = CHUNK_LOGITS,
    place: Place = CPU,
    trust_remote_code: bool = False,
    seed: int = 0,
    where: str = "model.path",
) -> Actor:
    """The policy of a Hugging Face folder, with new adapters if lora_rank > 0.

    Raises ConfigError for a missing path, CheckpointError for an unreadable folder or an architecture whose
    packed forward does not equal its plain one.
    """
    path = model_folder(path, where)
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code, where=where)
    model = load_causal_lm(path, dtype=dtype, place=place, trust_remote_code=trust_remote_code, where=where)
    grow_to(model, tokenizer)
    make_trainable(
        model,
        lora_rank=lora_rank,
        lora_alpha=lora_alpha,
        target_modules=target_modules,
        enable_gradient_checkpointing=enable_gradient_checkpointing,
        seed=seed,
    )
    actor = Actor(model, tokenizer, path, logits_chunk=logits_chunk)
    _check_packed(actor, where)
    set_precision(model, precision, trunk_of(model), [model.get_output_embeddings()])
    return actor


class _Probe:
    def __init__(self, ids: list[int]) -> None:
        self.prompt_ids = torch.tensor(ids[:2]).numpy()
        self.response_ids = torch.tensor(ids[2:]).numpy()


@torch.no_grad()
def _check_packed(actor: Actor, where: str) -> None:
    """Two short rows in one pack must score as each does alone through the model's own forward."""
    width = actor.vocabulary
    rows = [_Probe([i % width for i in (3, 1, 4, 1, 5)]), _Probe([i % width for i in (2, 7, 1)])]
    packed, _ = actor.log_probs(rows, torch.ones(2))
    for i, row in enumerate(rows):
        ids = torch.tensor([*row.prompt_ids, *row.response_ids], device=actor.device)
        logits = actor.model(
            input_ids=ids.unsqueeze(0), attention_mask=torch.ones_like(ids).unsqueeze(0)
        ).logits[0]
        alone = log_probs_of(logits[1:-1], ids[2:]).cpu()
        gap = (packed[i, : len(alone)] - alone).abs().max().item()
        if not math.isfinite(gap):
            raise CheckpointError(
                f"{where}: {actor.path} gives log-probs that are not finite; "
                "its weights are damaged, use another model"
            )
        if not gap < 1e-3:
            name = actor.model.config.model_type
            raise CheckpointError(
                f"{where}: packed rows of a {name} model differ from its own forward by {gap:.3g} nats; "
                "this architecture is not supported yet"
            )
