"""What one key means beside the others: prompts into rows, micro-batches, keys that must equal another.

Works on the entries of all sources, after translation and before the recipe is made; gives notes to print.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rein.config.keys import default_of
from rein.config.reading import Entry
from rein.config.verl_keys import EXPERIMENT, FILTER, FOLLOWS, RESUME_MODE
from rein.errors import ConfigError

Entries = dict[str, Entry]  # by Rein's key


def settle(entries: Entries, counts_prompts: Iterable[str]) -> list[str]:
    """Change `entries` in place until only Rein's keys are left; `counts_prompts`: sizes given in prompts."""
    return [
        *_resume(entries),
        *_truncation(entries),
        *_out(entries),
        *_follow(entries),
        *_rows(entries, counts_prompts),
        *_micro_batches(entries),
        *_score(entries),
    ]


def _value(entries: Entries, key: str) -> Any:
    return entries[key].value if key in entries else default_of(key)


def _resume(entries: Entries) -> list[str]:
    if "resume" in entries and entries["resume"].value is None:
        del entries["resume"]  # trainer.resume_from_path: null
    mode = entries.pop(RESUME_MODE, None)
    if mode is None:
        return []
    where, path = f"{mode.where}: {mode.spelled}={mode.value}", entries.get("resume")
    if mode.value == "resume_path":
        if path is None:
            raise ConfigError(f"{where}: needs the snapshot's folder; write resume=FOLDER")
        return [f"{mode.spelled} resume_path: resume is {path.value}"]
    if mode.value not in ("auto", "disable"):
        raise ConfigError(f"{where}: is not auto, disable or resume_path; write resume=auto|never|FOLDER")
    if path is not None:
        raise ConfigError(f"{where}: contradicts {path.spelled} ({path.where}); keep one of them")
    value = "never" if mode.value == "disable" else "auto"
    entries["resume"] = replace(mode, key="resume", value=value, text=value)
    return [f"{mode.spelled} {mode.value} is read as resume {value}"]


def _truncation(entries: Entries) -> list[str]:
    wanted = entries.pop(FILTER, None)
    if wanted is None or wanted.value in (False, None):
        return []
    if wanted.value is not True:
        raise ConfigError(
            f"{wanted.where}: {wanted.spelled}={wanted.text}: must be true or false; write one of them"
        )
    entries["data.truncation"] = replace(wanted, key="data.truncation", value="drop", text="drop")
    return [f"{wanted.spelled} true is read as data.truncation drop"]


def _out(entries: Entries) -> list[str]:
    name = entries.get(EXPERIMENT)
    if name is None or name.value is None:
        return []
    if "out" in entries:
        return [f"{name.spelled} names the run in trackers alone: its folder is out {entries['out'].value}"]
    folder = f"runs/{name.text}"
    entries["out"] = replace(name, key="out", value=folder, text=folder)
    return [f"{name.spelled} names the run's folder: out {folder}"]


def _follow(entries: Entries) -> list[str]:
    for key, leader in FOLLOWS.items():
        entry = entries.pop(key, None)
        if entry is not None and entry.value is not None and entry.value != _value(entries, leader):
            raise ConfigError(
                f"{entry.where}: {entry.spelled}={entry.text}: follows {leader} "
                f"({json.dumps(_value(entries, leader))}), and a value of its own is not built yet; remove it"
            )
    return []


def _rows(entries: Entries, counts_prompts: Iterable[str]) -> list[str]:
    notes = []
    n = _value(entries, "rollout.n")
    for key in counts_prompts:
        entry = entries[key]
        if type(entry.value) is int and type(n) is int:
            rows = entry.value * n
            entries[key] = replace(entry, value=rows, text=str(rows))
            notes.append(f"{entry.spelled} {entry.value} prompts x rollout.n {n} = {rows} rows")
    return notes


def _score(entries: Entries) -> list[str]:
    """A reward model that the recipe trains is what scores, unless another reward is named."""
    stages = entries.get("stages")
    made = stages is not None and isinstance(stages.value, list) and {"reward", "score"} <= set(stages.value)
    if stages is None or not made or "score.reward" in entries:
        return []
    entries["score.reward"] = replace(stages, key="score.reward", value="model", text="model")
    return ["score.reward is model: the reward stage makes one"]


def _micro_batches(entries: Entries) -> list[str]:
    size, dynamic = entries.get("actor.ppo_micro_batch_size"), entries.get("actor.use_dynamic_bsz")
    size = size or entries.get("critic.ppo_micro_batch_size")
    if size is None or size.value is None:
        return []
    if dynamic is not None and dynamic.value is False:
        return []
    if dynamic is not None or size.key != "actor.ppo_micro_batch_size":
        return [
            f"{size.spelled} {size.value} is not used: actor.use_dynamic_bsz cuts micro-batches by tokens"
        ]
    entries["actor.use_dynamic_bsz"] = replace(size, key="actor.use_dynamic_bsz", value=False, text="false")
    return [f"{size.spelled} {size.value}: micro-batches are cut by rows (actor.use_dynamic_bsz false)"]
