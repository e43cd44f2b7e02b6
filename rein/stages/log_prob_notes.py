"""What an engine's log-probs are: a sample of them beside the actor's own. Not a verb.

What is needed is the log-prob of the sampled token at the sampling temperature over the whole vocabulary. An
engine may state another (functional/calibration.KINDS): the actor's own are stored in its place, which is
right where it is recognised, for then the weights are the same. Where none of the actor's is near, the server
has other weights or states something else; nothing is stored, and behavior is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pyarrow as pa
import torch

from rein.config.recipe import Recipe
from rein.data.batches import row_batches
from rein.experience import in_micro_batches, padded, temperatures
from rein.functional.calibration import KINDS, kind_of, other_kinds
from rein.models.actor import Actor, load_actor
from rein.models.place import loading
from rein.protocols import Tell
from rein.types import Trajectory

STORED = {"processed": "as given", "raw": "recomputed", "cut": "recomputed", "unknown": "left out"}
KIND, WHAT, MEAN, MAX = KEYS = (
    "rein.log_probs_kind",
    "rein.log_probs_stored",
    "rein.log_prob_diff_mean",
    "rein.log_prob_diff_max",
)
APART = pa.struct([(f"{kind}_{how}", pa.float64()) for kind in KINDS for how in ("sum", "max")])


class Compared(NamedTuple):
    """What the engine's log-probs are, and how far they are from the actor's own of that kind, in nats."""

    kind: str
    mean: float
    largest: float

    @property
    def known(self) -> bool:
        """Whether the actor's weights wrote the rows."""
        return self.kind != "unknown"

    @property
    def notes(self) -> dict[str, str]:
        """For the file's metadata."""
        return {
            KIND: self.kind,
            WHAT: STORED[self.kind],
            MEAN: f"{self.mean:.3g}",
            MAX: f"{self.largest:.3g}",
        }

    def said(self, policy: str) -> str:
        """For the console; nothing where they are what is needed."""
        near = f"mean |difference| {self.mean:.2g} nats"
        if not self.known:
            return (
                f"warning: the engine's log-probs are not those of {policy} ({near}) and are left out; serve "
                "its weights, in the precision that they have here"
            )
        what = {"raw": "at temperature 1", "cut": "of the tokens that top_p keeps"}.get(self.kind)
        said = f"the engine's log-probs are those {what} ({near}): the actor's own are stored"
        return said if what else ""


def apart(actor: Actor, rows: Sequence[Trajectory], budget: int) -> list[dict[str, float]]:
    """|stored - the actor's own| of each of KINDS, the sum and the largest over each row.

    Temperature and top_p are those of the first row. Greedy rows have none stored, and are 0 apart.
    """
    if not rows or rows[0].behavior_log_probs is None:
        return [dict.fromkeys((field.name for field in APART), 0.0) for _ in rows]
    processed = in_micro_batches(
        rows, budget, lambda part, temp: actor.log_probs(part, temp)[0], share=actor.shares_prompts
    )
    own = torch.stack([processed.cpu()] * len(KINDS))
    temperature, top_p = rows[0].temperature, rows[0].top_p
    if temperature != 1 or top_p < 1:  # else all kinds are one
        for part in row_batches(rows, budget, share=actor.shares_prompts):
            some = [rows[i] for i in part]
            others = actor.over_logits(some, temperatures(some), partial(other_kinds, top_p=top_p)).cpu()
            own[1:, part, : others.shape[-1]] = others.to(own)
    given = [row.behavior_log_probs for row in rows if row.behavior_log_probs is not None]
    stored = padded(given, torch.float32)
    found: list[dict[str, float]] = [{} for _ in rows]
    for kind, values in zip(KINDS, own, strict=True):
        gaps = (values - stored).abs()
        for i, row in enumerate(rows):
            gap = gaps[i, : len(row.response_ids)].double()
            found[i] |= {f"{kind}_sum": gap.sum().item(), f"{kind}_max": gap.max().item()}
    return found


def compared(found: Sequence[dict[str, float]], tokens: int) -> Compared:
    """What the sample says, all of its rows and tokens together."""
    means = {kind: sum(one[f"{kind}_sum"] for one in found) / max(tokens, 1) for kind in KINDS}
    kind = kind_of(means)
    near = "processed" if kind == "unknown" else kind
    return Compared(kind, means[near], max((one[f"{near}_max"] for one in found), default=0.0))


class Rescorer:
    """Worker: the actor's own log-probs of rows, one list a row."""

    def __init__(self, recipe: Recipe, policy: str) -> None:
        self.budget = recipe.actor.token_budget
        self.actor = load_actor(policy, **loading(recipe.model))

    def __call__(self, rows: Sequence[Trajectory], tell: Tell) -> pa.Table:
        actor = self.actor
        own = in_micro_batches(
            rows,
            self.budget,
            lambda part, temp: actor.log_probs(part, temp)[0],
            share=actor.shares_prompts,
        )
        tell(len(rows))
        lists = [own[i, : len(row.response_ids)].cpu().numpy() for i, row in enumerate(rows)]
        return pa.table({"log_probs": pa.array(lists, pa.list_(pa.float32()))})
