"""A recipe file and key=value words in; one frozen Recipe and notes to print out, or an error of one line.

Errors name where (file and line, or the command line), what, and what to do. Opens no data and no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from rein.config.guards import Rule
from rein.config.keys import LEAVES, SECTIONS, nearest_key, takes_bounds, takes_text_only
from rein.config.methods import CORRECTION, LOSS, beneath
from rein.config.reading import COMMAND_LINE, Entry, read_file, read_words, refuse_twice
from rein.config.recipe import Recipe, RewardSpec
from rein.config.rules import broken
from rein.config.rules import kl_coefs as kl_coefs
from rein.config.settle import Entries, settle
from rein.config.verl_keys import COUNTS_PROMPTS, PREFIX, SETTLED, is_leaf, speaks_verl, translate
from rein.errors import CheckpointError, ConfigError

PACKAGED = Path(__file__).parent.parent / "recipes"

LATER = {  # values whose feature is planned: refused as "not built yet" instead of as unknown
    "algorithm.adv_estimator": "grpo_passk gdpo gpg optimal_token_baseline tir_optimal_token_baseline",
    "actor.policy_loss.loss_mode": "clip_cov kl_cov",
    "data.truncation": "middle",
    "model.dtype": "bfloat16 float16",
    "trainer.logger": "clearml vemlp_wandb file rl_insight",
}


def load(source: str | Path | None, words: Sequence[str] = ()) -> tuple[Recipe, list[str]]:
    """The recipe of a file or packaged name (`demo`), or of the words alone (None); and notes to print.

    Words override the file's keys, in whatever spelling. Raises ConfigError.
    """
    in_file = read_file(_find(source), is_leaf) if source is not None else []
    in_words = read_words(words, is_leaf)
    file_speaks = speaks_verl(in_file)
    merged: Entries = {}
    notes: list[str] = []
    for entries in (in_file, in_words):
        translated, said = translate(entries)
        refuse_twice(translated)
        notes += said
        merged |= {entry.key: entry for entry in translated}
    for given in merged.values():
        _refuse_unknown(given)
    words_speak = file_speaks or speaks_verl(in_words)
    in_prompts = [
        key
        for key in COUNTS_PROMPTS
        if (entry := merged.get(key)) is not None
        and (
            entry.spelled.startswith(PREFIX) or (words_speak if entry.where == COMMAND_LINE else file_speaks)
        )
    ]
    notes += settle(merged, in_prompts)
    notes += _methods(merged)
    return _validate(merged, source), notes


def settled_by(recipe: Recipe, method: str, settings: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe with this method, and `settings` beneath the keys that it gives itself; and what came of it.

    A key that has its default is not taken for given: a recipe written by a run names them all. What is left
    out is left out for both. Raises ConfigError where they do not go together.
    """
    given = _flat(recipe.model_dump(mode="json", exclude_unset=True, exclude_defaults=True, by_alias=True))
    given["algorithm.method"] = method
    if "data.leave_out" in settings:
        both = [*given.pop("data.leave_out", []), *settings["data.leave_out"]]
        settings = {**settings, "data.leave_out": list(dict.fromkeys(both))}
    if given.get("data.behavior", "recomputed") != "recomputed":
        settings = {key: value for key, value in settings.items() if key != "data.behavior_model"}
    below, notes = beneath({**settings, **given})
    for key in settings.keys() & given.keys():
        if settings[key] != given[key]:
            notes.append(f"{key}={given[key]} is given and holds")
    nested: dict[str, Any] = {}
    for key, value in {**settings, **below, **given}.items():
        _put(nested, key, value)
    found = Recipe.model_validate_json(json.dumps(nested), strict=True)
    for key, message in broken(found):
        raise ConfigError(f"algorithm.method auto -> {method}: {key}: {message}; or name another method")
    return found, notes


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Every key in its canonical name with its value, ready for JSON."""
    values: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    return values


def dump(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe as JSON; `load` reads it back to an equal one."""
    write_json(path, resolved(recipe))


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that `path` is always the old file or the whole new one. Raises CheckpointError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise CheckpointError(
            f"{path}: cannot be written ({error.strerror}); free space or choose another out="
        ) from error


def _methods(entries: Entries) -> list[str]:
    """Put what the method and the preset stand for beneath the keys that are given."""
    found, notes = beneath({key: entry.value for key, entry in entries.items()})
    for key, value in found.items():
        source = entries.get(f"{CORRECTION}.preset") if key.startswith(CORRECTION) else None
        source = source or entries.get("algorithm.method") or entries[LOSS]
        text = None if isinstance(value, bool) or value is None else str(value)
        entries[key] = replace(source, key=key, value=value, text=text)
    return notes


def _find(source: str | Path) -> Path:
    """The file itself, else the packaged recipe of that name."""
    path = Path(source)
    if os.path.exists(path):  # False for a name that no file can have, too
        return path
    known = sorted(file.stem for file in PACKAGED.glob("*.yaml"))
    if path.parent == Path() and path.name.removesuffix(".yaml") in known:
        return PACKAGED / f"{path.name.removesuffix('.yaml')}.yaml"
    close = get_close_matches(path.name.removesuffix(".yaml"), known, n=1)
    advice = f"did you mean the packaged recipe {close[0]}?" if close else "check the path"
    raise ConfigError(f"{source}: no such recipe file; {advice} (packaged: {', '.join(known)})")


def _refuse_unknown(entry: Entry) -> None:
    key = entry.key
    if key in LEAVES or key in SETTLED:
        return
    where = f"{entry.where}: {entry.spelled}"
    if key not in SECTIONS:
        section, _, _ = key.rpartition(".")
        if section in LEAVES:
            raise ConfigError(
                f"{where} is unknown: {section} is one value, not a section; write {section}=VALUE"
            )
        raise ConfigError(f"{where} is unknown; {nearest_key(key)}")
    if entry.value not in (None, {}):  # a section left empty is fine
        inside = [leaf for leaf in LEAVES if leaf.startswith(f"{key}.")]
        example = f"{key}.path" if f"{key}.path" in inside else inside[0]
        raise ConfigError(f"{where} is a section, not a value; write one of its keys, for example {example}")


def _validate(entries: Entries, source: str | Path | None) -> Recipe:
    nested: dict[str, Any] = {}
    for key, entry in entries.items():
        if key not in LEAVES:
            continue
        number = isinstance(entry.value, int | float) and not isinstance(entry.value, bool)
        as_text = takes_text_only(key) or (takes_bounds(key) and "_" in str(entry.text))
        _put(nested, key, entry.text if number and as_text else entry.value)
    try:
        # As JSON, because strict validation turns lists into tuples only there. Strict: true is no number.
        recipe = Recipe.model_validate_json(json.dumps(nested, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(_first_line(error, entries, source)) from error
    for key, message in broken(recipe):
        raise ConfigError(f"{_where(key, '', entries, source)}: {message}")
    return recipe


def _put(nested: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        nested = nested.setdefault(section, {})
    nested[last] = value


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """By Rein's keys; a value that is a mapping itself stays whole."""
    found: dict[str, Any] = {}
    for name, value in nested.items():
        key = f"{prefix}{name}"
        found |= {key: value} if key in LEAVES else _flat(value, f"{key}.")
    return found


def _where(key: str, value: str, entries: Entries, source: str | Path | None) -> str:
    if key not in entries:
        return f"{source or COMMAND_LINE}: {key}{value}"
    entry = entries[key]
    return f"{entry.where}: {entry.spelled}{value}" + ("" if entry.spelled == key else f" ({key})")


def _first_line(error: ValidationError, entries: Entries, source: str | Path | None) -> str:
    """The first of pydantic's errors in our words; further ones are counted."""
    errors = error.errors(include_url=False)
    first = errors[0]
    loc = [str(part) for part in first["loc"]]
    key = next((".".join(loc[:n]) for n in range(len(loc), 0, -1) if ".".join(loc[:n]) in LEAVES), "")
    depth = key.count(".") + 1
    others = {".".join(map(str, each["loc"][:depth])) for each in errors[1:]} - {key}
    more = f" (and {len(others)} more)" if others else ""
    if not key:  # a rule of the whole recipe, which names its keys itself
        message = str(first["ctx"]["error"]) if "ctx" in first else first["msg"]
        blamed = next((k for k in sorted(entries, key=len, reverse=True) if message.startswith(k)), "")
        where = entries[blamed].where if blamed else str(source or COMMAND_LINE)
        return f"{where}: {message}{more}"
    written = entries[key].text if key in entries else None
    if written is None or not isinstance(first["input"], int | float):
        written = json.dumps(first["input"], ensure_ascii=False, default=str)
    inner = [part for part in first["loc"][depth:] if part not in ("Rule", "str")]  # kinds, not keys
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in inner)
    place = place if "." in place else ""
    return f"{_where(key, f'{place}={written}', entries, source)}: {_complaint(key, dict(first))}{more}"


def _complaint(key: str, error: dict[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return _unknown_name(key, str(error["input"]), context["expected"])
    if kind == "value_error":
        return f"{context['error']}; correct it"
    if kind == "missing":
        last = error["loc"][-1]
        return "is too short a list; add to it" if isinstance(last, int) else f"{last} is missing; write it"
    if kind == "extra_forbidden":
        known = Rule.model_fields if key.startswith("guards.") else RewardSpec.model_fields
        names = [field.alias or name for name, field in known.items()]
        close = get_close_matches(str(error["loc"][-1]), names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(names)}"
        return f"{error['loc'][-1]} is not known there; {hint}"
    wanted = {
        "int": "a whole number",
        "float": "a number, such as 0.1 or 1e-6",
        "finite_number": "a finite number",
        "bool": "true or false",
        "string": "text (in quotes)",
        "list": "a list, such as [a, b]",
        "tuple": "a list, such as [0.9, 0.99]",
        "model": "a name, or a mapping with name, weight and options",
        "greater_than": f"above {context.get('gt', 0):.10g}",
        "greater_than_equal": f"at least {context.get('ge', 0):.10g}",
        "less_than_equal": f"at most {context.get('le', 0):.10g}",
        "too_short": f"a list of at least {context.get('min_length')}",
        "too_long": f"a list of at most {context.get('max_length')}",
    }
    for name in (kind, kind.partition("_")[0]):
        if name in wanted:
            return f"must be {wanted[name]}; correct it"
    return f"{error['msg']}; correct it"


def _unknown_name(key: str, name: str, expected: str) -> str:
    names = expected.replace("'", "").replace(" or ", ", ").split(", ")
    known = ", ".join(names + (["null"] if type(None) in get_args(LEAVES[key].annotation) else []))
    if name in LATER.get(key, "").split():
        return f"{name} is not built yet; write one of {known}"
    close = get_close_matches(name, names, n=1)
    hint = f"did you mean {close[0]}?" if close else "write one of them"
    return f"must be one of {known}; {hint}"
