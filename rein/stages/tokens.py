"""One encoder for a stage, held against what made the stage's model and files. Not a verb.

A model folder stands beside the manifest of the stage that made it; files carry their own note.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rein import manifest
from rein.config.recipe import Recipe
from rein.data import token_marks
from rein.data.tokenize import Encoder
from rein.models.actor import Actor
from rein.models.load import load_tokenizer, model_folder, stop_ids, vocabulary_of
from rein.models.vocabulary import highest_id
from rein.tracking.console import Console

FACT = "tokens"  # in a manifest's facts: Encoder.marks()


def encoder_of(actor: Actor, recipe: Recipe) -> Encoder:
    return Encoder(
        actor.tokenizer,
        apply_chat_template=recipe.data.apply_chat_template,
        stop_ids=set(actor.stop_ids),
        vocab_size=actor.vocabulary,
    )


def encoder_in(folder: str, recipe: Recipe) -> Encoder:
    """The same of a model's folder, without its weights."""
    path = model_folder(folder, "model.path")
    tokenizer = load_tokenizer(path, trust_remote_code=recipe.model.trust_remote_code)
    rows = vocabulary_of(path)
    return Encoder(
        tokenizer,
        apply_chat_template=recipe.data.apply_chat_template,
        stop_ids=set(stop_ids(path, tokenizer)),
        vocab_size=None if rows is None else max(rows, highest_id(tokenizer) + 1),
    )


def compared(encoder: Encoder, console: Console, model: str, files: Sequence[str] = ()) -> dict[str, str]:
    """The encoder's marks, for the manifest; says where a template or stop ids changed since.

    Raises DataError where the model or a file was made with another tokenizer.
    """
    made = (manifest.read(Path(model).expanduser().parent) or {}).get("facts", {}).get(FACT) or {}
    use = "than its folder holds now; put the former files back"
    lines = token_marks.differences(made, encoder, model, use)
    for line in [*lines, *(token_marks.check_files(files, encoder, model) if files else ())]:
        console.say(f"warning: {line}")
    return encoder.marks()
