"""A trained model as a plain Hugging Face folder that `transformers` loads by itself, where the gate lets it.

Adapters are fused in float32 (or left alone, `export.adapter_only`), tokenizer, template and all stop ids
kept, and the folder is loaded again and compared with what was to be exported before it takes its place.
README.md (the model card) and rein_export.json say where it comes from and what the gate said of it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rein import manifest
from rein.config import paths
from rein.config.recipe import Recipe
from rein.drafts import draft_of, replace_folder
from rein.errors import CheckpointError, ConfigError, GateFailed
from rein.hashing import hash_file
from rein.model_files import EXPORT, dtype_of, read_json, weights_hash, write_object
from rein.models.actor import load_actor
from rein.models.adapters import CONFIG, WEIGHTS, adapters_in, base_named
from rein.models.critic import load_critic
from rein.models.load import DTYPES, load_tokenizer, model_folder
from rein.models.reward_model import load_reward_model
from rein.models.save import TORCH_DTYPES, cast_folder
from rein.stages import export_check as check
from rein.stages.gate_facts import Passage, pass_gate, refuse
from rein.stages.model_card import card
from rein.tracking.console import Console

LOAD: Mapping[str, Callable[..., Any]] = {
    "actor": load_actor,
    "critic": load_critic,
    "reward": load_reward_model,
}


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Export export.path, else what training made, to export.to. Raises GateFailed: nothing is exported."""
    kind, source = recipe.export.kind, paths.export_source(recipe)
    target = paths.export_target(recipe)
    _refuse_taken(target, source, asked=bool(recipe.export.to))
    if kind == "actor":
        gate = pass_gate(recipe, source, console)
    else:
        gate = Passage(False, f"a {kind} model gives no answers to judge")
    refused = refuse(gate, source)
    if refused is not None and not recipe.export.force:
        why = "nothing is exported: train on, or insist with --force, which is recorded"
        raise GateFailed(f"{refused}; {why}")
    if refused is not None:
        console.say(f"warning: {source} is exported by force, which its model card says")
    draft = draft_of(target)
    try:
        make = _adapters if recipe.export.adapter_only else _whole
        facts = {
            "from": source,
            "kind": kind,
            **make(recipe, Path(model_folder(source, "export.path")), draft, target),
            "gate": gate.as_json(forced=recipe.export.force),
        }
        _describe(recipe, source, draft, facts)
        replace_folder(draft, target)
    except OSError as error:
        raise CheckpointError(
            f"{target}: cannot be written ({error}); free space or choose another export.to"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    console.say(f"exported: {target}")
    return facts | {"to": str(target), "sha256": weights_hash(target)}


def _whole(recipe: Recipe, source: Path, draft: Path, target: Path) -> dict[str, Any]:
    """Write the model in float32 (float64 where it is), compare it, round it to what it shall have."""
    kind, trust = recipe.export.kind, recipe.model.trust_remote_code
    own = dtype_of(_with_config(source))
    wide = "float64" if "float64" in (own, recipe.export.dtype) else "float32"
    model = LOAD[kind](str(source), dtype=wide, where="export.path", trust_remote_code=trust)
    model.save(draft)
    if kind == "actor":
        _write_stop_ids(draft, model)
    meant, tokenizer = check.logits(model.model), model.tokenizer
    del model  # no more than two are in memory
    load: dict[str, Any] = {"trust_remote_code": trust}
    exact = check.plain(draft, kind, dtype=DTYPES[wide], **load)
    found = check.logits(exact)
    facts: dict[str, Any] = {"reload_difference": check.difference(found, meant)}
    check.refuse_difference(facts["reload_difference"], target, "the written folder")
    adapted = check.unfused(source, **load) if kind == "actor" else None
    if adapted is not None:
        facts["fused_difference"] = check.from_unfused(exact, adapted, tokenizer)
        check.refuse_difference(facts["fused_difference"], target, "the fused model, beside its adapters,")
    del adapted
    dtype = TORCH_DTYPES[recipe.export.dtype or own]
    if dtype != DTYPES[wide]:
        cast_folder(draft, dtype)
        check.refuse_other_weights(exact, draft, target, dtype, kind, **load)
    return facts | {"dtype": str(dtype).removeprefix("torch.")}


def _adapters(recipe: Recipe, source: Path, draft: Path, target: Path) -> dict[str, Any]:
    """Write the adapters alone, with the tokenizer; on their base they say what the source says."""
    adapters = adapters_in(source)
    if recipe.export.kind != "actor" or adapters is None:
        raise ConfigError(
            f"export.adapter_only: {source} keeps no adapters on a base of theirs; write adapter_only=false"
        )
    if not (adapters / WEIGHTS).is_file():
        raise CheckpointError(f"{adapters}: has no {WEIGHTS}; save the adapters with safetensors")
    trust = recipe.model.trust_remote_code
    base = Path(model_folder(base_named(adapters), "export.path"))
    draft.mkdir(parents=True)
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(adapters / name, draft / name)
    write_object(draft / CONFIG, read_json(draft / CONFIG) | {"base_model_name_or_path": str(base)})
    load_tokenizer(str(source), trust_remote_code=trust).save_pretrained(str(draft))
    whole = load_actor(str(source), where="export.path", trust_remote_code=trust)
    alone = check.unfused(draft, trust_remote_code=trust)
    found = check.from_unfused(whole.model, alone, whole.tokenizer)
    check.refuse_difference(found, target, "the base with the adapters")
    return {"fused_difference": found, "base": str(base)}


def _with_config(source: Path) -> Path:
    """The folder whose configuration says the precision: an adapter's base."""
    alone = (source / CONFIG).exists()
    return Path(model_folder(base_named(source), "export.path")) if alone else source


def _write_stop_ids(draft: Path, actor: Any) -> None:
    """Every id that ends a response, where engines look for them."""
    file = draft / "generation_config.json"
    body, ends = read_json(file), list(actor.stop_ids)
    if ends:
        body["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    body.setdefault("pad_token_id", actor.tokenizer.pad_token_id)
    write_object(file, body)


def _describe(recipe: Recipe, source: str, draft: Path, facts: Mapping[str, Any]) -> None:
    text = card(recipe, source, facts)
    (draft / "README.md").write_text(text, encoding="utf-8")
    files = {file.name: hash_file(file, whole=True) for file in sorted(draft.iterdir()) if file.is_file()}
    body = {
        "version": 1,
        **facts,
        "files": files,
        "versions": manifest.versions(),
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    write_object(draft / EXPORT, body)


def _refuse_taken(target: Path, source: str, *, asked: bool) -> None:
    """Raise ConfigError for a target that holds anything but an earlier export: it would be lost."""
    read = {Path(source).expanduser(): "what is exported"}
    if (adapters := adapters_in(Path(source).expanduser())) is not None:
        read[Path(base_named(adapters)).expanduser()] = "the base of what is exported"
    for folder, what in read.items():
        if folder.resolve() == target.resolve():
            raise ConfigError(f"export.to: {target} is {what}; give a new or empty folder")
    if not asked:
        return
    if target.is_symlink():
        raise ConfigError(f"export.to: {target} is a link, which would be lost; give the folder itself")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / EXPORT).is_file() or any(path.is_dir() for path in target.iterdir()):
        raise ConfigError(
            f"export.to: {target} holds other things than an earlier export, which would be lost; give a "
            "new or empty folder"
        )
