"""A trained model as a plain Hugging Face folder that `transformers` loads by itself.

Adapters are fused, the tokenizer and generation settings kept, and the written folder is loaded again and
compared with what was to be exported before it takes its place.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rein.config import paths
from rein.config.recipe import Recipe
from rein.drafts import draft_of, replace_folder
from rein.errors import CheckpointError, ConfigError
from rein.models.actor import load_actor
from rein.models.load import weights_hash
from rein.tracking.console import Console

TOLERANCE = 1e-4


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Export export.path, else train's best, to export.to."""
    source = recipe.export.path or paths.trained_actor(recipe)
    target = Path(recipe.export.to) if recipe.export.to else paths.stage_dir(recipe, "export") / "model"
    if recipe.export.to:
        _refuse_taken(target)
    actor = load_actor(source, dtype=recipe.model.dtype, where="export.path")
    draft = draft_of(target)
    try:
        actor.save(draft)
        difference = _reload_difference(actor.model, draft)
        if not difference <= TOLERANCE:
            raise CheckpointError(
                f"{target}: the written folder differs by {difference:.3g} when loaded; not exported"
            )
        replace_folder(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console.say(f"exported: {target}")
    return {
        "from": source,
        "to": str(target),
        "reload_difference": difference,
        "sha256": weights_hash(target),
    }


def _refuse_taken(target: Path) -> None:
    """Raise ConfigError for a target that holds anything but an earlier export: it would be lost."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / "config.json").is_file() or any(path.is_dir() for path in target.iterdir()):
        raise ConfigError(
            f"export.to: {target} holds other things than a model, which would be lost; give a new "
            "or empty folder"
        )


@torch.no_grad()
def _reload_difference(model: Any, folder: Path) -> float:
    """Largest difference of logits between the live model and the folder as plain transformers loads it."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = torch.arange(min(16, vocabulary)).unsqueeze(0)
    mask = torch.ones_like(ids)
    live = model(input_ids=ids, attention_mask=mask).logits
    return float((plain(input_ids=ids, attention_mask=mask).logits - live).abs().max())
