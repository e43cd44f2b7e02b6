"""Whether an exported folder is what was to be exported: loaded again by plain transformers, and compared.

Part of stages/export.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rein.errors import CheckpointError, ReinError
from rein.models.adapters import adapters_in, attached, base_named
from rein.models.load import first_line, model_folder
from rein.models.vocabulary import highest_id
from rein.protocols import Tokenizer

TOLERANCE = 1e-4  # of logits in float32
POSITIONS = 48  # of the row they are compared on


def plain(folder: Path, kind: str, *, dtype: Any = torch.float32, trust_remote_code: bool = False) -> Any:
    """The folder as transformers loads it by itself."""
    auto = AutoModelForCausalLM if kind == "actor" else AutoModelForSequenceClassification
    try:
        model, info = auto.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder}: what was written cannot be loaded ({first_line(error)}); not exported"
        ) from error
    if info["missing_keys"]:
        raise CheckpointError(
            f"{folder}: what was written lacks {sorted(info['missing_keys'])[0]}; not exported"
        )
    return model.eval()


def unfused(source: Path, *, trust_remote_code: bool = False) -> Any | None:
    """The policy at `source` as its base with adapters on it; None where it has none, or its base is gone."""
    adapters = adapters_in(source)
    if adapters is None:
        return None
    try:
        base = Path(model_folder(base_named(adapters), "export.path"))
    except ReinError:
        return None
    return attached(plain(base, "actor", trust_remote_code=trust_remote_code), adapters).eval()


def from_unfused(fused: Any, adapted: Any, tokenizer: Tokenizer) -> float:
    """Largest difference of the logits from those of base and adapters.

    Ids of the tokenizer that have no row there were given one when the model was loaded: they are left out.
    """
    known = _rows(adapted)
    grown = _rows(fused) == highest_id(tokenizer) + 1 > known
    return difference(logits(fused, known if grown else None), logits(adapted))


def _rows(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


@torch.no_grad()
def logits(model: Any, vocabulary: int | None = None) -> Tensor:
    """[1, T, V] on ids that are spread over the vocabulary (or its first so many), the last among them."""
    vocabulary = vocabulary or _rows(model)
    ids = torch.linspace(0, vocabulary - 1, min(POSITIONS, vocabulary)).long().unsqueeze(0)
    found: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return found[..., :vocabulary].float()


def difference(one: Tensor, other: Tensor) -> float:
    """Largest of the logits; infinite where the vocabularies differ."""
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


def refuse_difference(found: float, target: Path, of: str) -> None:
    """Raise CheckpointError where logits differ by more than float32 does."""
    if not found <= TOLERANCE:
        raise CheckpointError(
            f"{target}: {of} gives logits that differ by {found:.3g} when loaded (limit {TOLERANCE:g}); "
            "not exported"
        )


def refuse_other_weights(exact: Any, draft: Path, target: Path, dtype: Any, kind: str, **load: Any) -> None:
    """Raise CheckpointError where the rounded folder is not `exact`, rounded."""
    rounded = plain(draft, kind, dtype="auto", **load)
    if rounded.dtype != dtype:
        raise CheckpointError(f"{target}: loads as {rounded.dtype}, not as {dtype}; not exported")
    state = rounded.state_dict()
    for name, tensor in exact.state_dict().items():
        wanted = tensor.to(dtype) if tensor.is_floating_point() else tensor
        if not torch.equal(state[name], wanted):
            raise CheckpointError(f"{target}: {name} is not what was to be written; not exported")
