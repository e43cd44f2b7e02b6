"""What an audit of the recipe's own rows says of the recipe, as lines and warnings. Reads audit.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rein.config import paths
from rein.config.load import resolved, settled_by
from rein.config.methods import AUTO
from rein.config.recipe import Recipe
from rein.data.files import sources
from rein.data.parquet import columns_of
from rein.data.schemas import kind_of
from rein.errors import DataError


def audited(recipe: Recipe) -> tuple[list[str], list[str]]:
    """(lines, warnings); nothing where train is not in the recipe, or the audit is of other files."""
    if "train" not in recipe.stages:
        return [], []
    auto = recipe.algorithm.method == AUTO
    facts = _facts(recipe)
    if facts is None:
        said = "algorithm.method auto: train audits the rows first; `rein audit` shows what it says"
        return [said] if auto else [], []
    verdict = facts["verdict"]
    lines = [f"audit: {verdict['word']}", *(f"audit: {reason['said']}" for reason in verdict["reasons"])]
    if verdict["decision"] == "stop":
        return lines, ["the audit says not to train on these rows"]
    if auto:
        return lines, []
    own = _flat(resolved(recipe))
    return lines, [
        f"the audit asks for {key}={value}, the recipe has {own.get(key)}; algorithm.method=auto follows it"
        for key, value in verdict["settings"].items()
        if own.get(key) != value
    ]


def as_planned(recipe: Recipe) -> Recipe:
    """Under `auto` the plan of pairs is dpo's; of other rows it is ppo's until they are audited."""
    if recipe.algorithm.method != AUTO or "train" not in recipe.stages:
        return recipe
    try:
        kind = kind_of(columns_of(sources(paths.train_files(recipe))[0]))
    except DataError:  # made by an earlier stage, or no file: the plan says so itself
        return recipe
    return settled_by(recipe, "dpo", {})[0] if kind == "preferences" else recipe


def _facts(recipe: Recipe) -> Mapping[str, Any] | None:
    file = paths.stage_dir(recipe, "audit") / "audit.json"
    try:
        facts: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        told = [(each["name"], each["bytes"]) for each in facts["files"]]
        found = [(each.name, each.path.stat().st_size) for each in sources(paths.train_files(recipe))]
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None
    return facts if told == found and facts.get("verdict") else None


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in nested.items():
        found[f"{prefix}{name}"] = value
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
    return found
