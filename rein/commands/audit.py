"""`rein audit DATA... [key=value ...]`: one page of facts about data files, before anything trains on them.

Writes audit.json, audit.html and rejects.jsonl to `<out>/audit`. With model.path its
tokenizer measures text, its weights score a sample of the rows, and the verdict is the one that training
obeys. DATA may be a recipe: then the files that its first stage reads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rein.commands.check_plan import open_encoder
from rein.config import paths
from rein.config.load import PACKAGED, load, write_json
from rein.config.recipe import Recipe, Sft
from rein.data.audit import audit
from rein.data.audit.evidence import evidence_in
from rein.data.audit.verdict import Reason, judge
from rein.data.files import Files, Source, atomic, is_parquet, sources, unread
from rein.data.loader import write_rejects
from rein.data.parquet import columns_of, row_count
from rein.data.tokenize import Encoder
from rein.errors import ConfigError, DataError
from rein.report.audit import lines, render, sections
from rein.report.section import Facts
from rein.stages.shards import Shards
from rein.tracking.console import Console

Keys = tuple[str, str]  # of a demonstration's prompt and response


def run(
    words: Sequence[str], console: Console, *, model: str | None = None, against: Sequence[str] = ()
) -> dict[str, Any]:
    """Audit, print, write; returns the facts. Raises ConfigError or DataError."""
    given, recipe, notes = _read(words, model, against)
    for note in notes:
        console.say(f"note: {note}")
    files, keys = _chosen(given, recipe)
    for note in unread(files):
        console.say(f"note: {note}")
    folder = paths.stage_dir(recipe, "audit")
    encoder, own = _encoder(recipe)
    evaluation = [*recipe.evaluate.files, *recipe.data.val_files]
    with console.progress(_rows(sources(files)), "audit") as advance:
        facts, rejects = audit(
            files,
            recipe.data,
            encoder=encoder,
            own_tokens=own,
            against=evaluation or None,
            sft=keys,
            passed=lambda rows: advance(rows),
        )
    write_rejects(folder / "rejects.jsonl", rejects)
    shards = Shards(recipe, console, "audit")
    facts |= _judged(recipe, files, facts, shards)
    _write(facts, folder, console)
    shards.done()
    return facts


def _judged(recipe: Recipe, files: Files, facts: Facts, shards: Shards) -> dict[str, Any]:
    """What the model of model.path says of the rows, where there is one, and what follows.

    Files that training refuses are a finding here, no error.
    """
    evaluation = [*recipe.evaluate.files, *recipe.data.val_files]
    verdict = judge(evidence_in(facts, evaluation))
    answers = facts["kind"] in ("trajectories", "preferences") and facts["rows"]["usable"]
    if recipe.model.path is None or not answers:
        return {"verdict": verdict.as_json()}
    from rein.commands.audit_model import audited  # imports torch

    names = [files] if isinstance(files, str | Path) else list(files)
    try:
        found = audited(recipe, names, recipe.model.path, shards)
    except DataError as error:
        refused = Reason("refused", "stop", f"training refuses the data: {error}")
        return {"verdict": verdict._replace(decision="stop", reasons=[refused, *verdict.reasons]).as_json()}
    return {"model": found.model, "verdict": found.verdict.as_json()}


def _write(facts: Facts, folder: Path, console: Console) -> None:
    """Both files and the page at the terminal."""
    made = sections(facts)
    write_json(folder / "audit.json", facts)
    title = "Rein audit: " + ", ".join(file["name"] for file in facts["files"][:3])
    with atomic(folder / "audit.html") as draft:
        draft.write_text(render(facts, made, title), encoding="utf-8", errors="replace")
    for line in lines(facts, made):
        console.say(line)
    console.say(f"audit: {folder / 'audit.html'} (facts in audit.json, rows left out in rejects.jsonl)")


def _read(
    words: Sequence[str], model: str | None, against: Sequence[str]
) -> tuple[list[str], Recipe, list[str]]:
    """Data files, recipe and notes of the command line; options are keys by another name."""
    data, keys, recipes = list[str](), list[str](), list[str]()
    for word in words:
        if os.path.exists(word) and not word.endswith((".yaml", ".yml")):
            data.append(word)
        elif word.endswith((".yaml", ".yml")) or (PACKAGED / f"{word}.yaml").exists():
            recipes.append(word)
        else:
            (keys if "=" in word else data).append(word)
    if len(recipes) > 1:
        raise ConfigError(f"command line: {' and '.join(recipes)} are two recipes; give one")
    keys += [f"model.path={_quoted(model)}"] if model else []
    keys += [f"evaluate.files=[{', '.join(map(_quoted, against))}]"] if against else []
    recipe, notes = load(recipes[0] if recipes else None, keys)
    return data, recipe, notes


def _rows(found: Sequence[Source]) -> int:
    """About how many rows there are: of JSON, its lines."""
    return sum(row_count(source) if is_parquet(source) else _line_count(source.path) for source in found)


def _line_count(path: Path) -> int:
    with path.open("rb") as file:
        return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(1 << 20), b""))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _chosen(given: Sequence[str], recipe: Recipe) -> tuple[Files, Keys | None]:
    """The files to look at, and under which keys where they are demonstrations."""
    first = recipe.stages[0]
    of_stage = {
        "sft": recipe.sft.files,
        "reward": recipe.reward.files,
        "rollout": recipe.rollout.files,
        "score": recipe.score.files,
    }
    files = list(given) or of_stage.get(first) or recipe.data.train_files
    if not files:
        raise ConfigError("audit: the recipe names no data; give files, or set data.train_files")
    keys = (recipe.sft.prompt_key, recipe.sft.response_key)
    usual = (Sft().prompt_key, Sft().response_key)
    if keys != usual:
        roots = {key.partition(".")[0] for key in keys}
        have = set(columns_of(sources(files)[0]))
        return files, keys if roots <= have or set(keys) <= have else None
    return files, keys if first == "sft" and not given else None


def _encoder(recipe: Recipe) -> tuple[Encoder | None, list[str]]:
    """The tokenizer of model.path, and its own special tokens; none without a model."""
    if recipe.model.path is None:
        return None, []
    encoder = open_encoder(recipe, Path(recipe.model.path).expanduser())
    backend = getattr(encoder.tokenizer, "backend_tokenizer", None)
    added = {} if backend is None else backend.get_added_tokens_decoder()
    return encoder, [token.content for token in added.values() if token.special]
