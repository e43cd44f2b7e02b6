"""What a run folder knows of a model, held against the recipe's gate; for export and `rein run`. Not a verb.

Only an evaluation of these very weights counts, and only the training that wrote them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rein import journal, manifest
from rein.config import paths
from rein.config.recipe import Recipe
from rein.errors import ConfigError, GateFailed
from rein.gate import Line, Outcome, decide, failed
from rein.stages import judges
from rein.tracking.console import Console

KL = "probe/kl_reference"
ABSENT = "absent"  # manifest's hash of what is no file or folder: a hub's name


@dataclass(frozen=True, slots=True)
class Passage:
    """What the gate said of a model; `asked` is false where it was not to be asked, and `note` says why."""

    asked: bool
    note: str = ""
    lines: Sequence[Line] = field(default=())

    @property
    def passed(self) -> bool:
        return self.asked and not failed(self.lines)

    def as_json(self, *, forced: bool) -> dict[str, Any]:
        facts: dict[str, Any] = {"asked": self.asked}
        if not self.asked:
            return facts | {"note": self.note}
        lines = [line.as_json() for line in self.lines]
        return facts | {"passed": self.passed, "forced": forced and not self.passed, "lines": lines}


def pass_gate(recipe: Recipe, source: str, console: Console) -> Passage:
    """The gate's lines for the model at `source`, said on the console."""
    evaluation = evaluation_of(recipe, source)
    if recipe.gate.enable is False:
        found = Passage(False, "gate.enable is false")
    elif recipe.gate.enable is None and evaluation is None and "evaluate" not in recipe.stages:
        why = "nothing here has evaluated this model; run `rein evaluate`, or ask with gate.enable=true"
        found = Passage(False, why)
    else:
        found = Passage(True, lines=decide(recipe.gate, outcome(recipe, source, evaluation)))
    if not found.asked:
        console.say(f"gate: not asked, {found.note}")
    for line in found.lines:
        console.say(f"gate: {'passed' if line.passed else 'FAILED'}  {line.check}: {line.why}")
    return found


def refuse(found: Passage, source: str) -> GateFailed | None:
    """The error of a gate that was asked and failed."""
    if not found.asked or found.passed:
        return None
    reasons = "; ".join(f"{line.check}: {line.why}" for line in failed(found.lines))
    return GateFailed(f"{source}: did not pass the gate: {reasons}")


def refuse_run(recipe: Recipe, console: Console) -> GateFailed | None:
    """What the gate says of a run that exports nothing; an error only where it was asked for."""
    after = recipe.evaluate.after or paths.trained_actor(recipe)
    failed = refuse(pass_gate(recipe, after, console), after)
    return failed if recipe.gate.enable and not recipe.export.force else None


def evaluation_of(recipe: Recipe, source: str) -> dict[str, Any] | None:
    """evaluation.json where it judged what lies at `source` now as the recipe asks; else None.

    As it asks: by its truth, and against what it starts from. What a hub's name holds is not known.
    """
    folder = paths.stage_dir(recipe, "evaluate")
    try:
        found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
        models, inputs = found["models"], (manifest.read(folder) or {})["inputs"]
        before, after = (inputs[models[side]] for side in ("before", "after"))
        judges_now = [spec.name for spec in judges.truth(recipe)]
        if after == ABSENT or after != manifest.hash_input(source):
            return None
        if found.get("reward", judges_now) != judges_now or not _starts(recipe, models["before"], before):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found


def _starts(recipe: Recipe, name: str, judged: str) -> bool:
    """Whether the recipe starts from what was judged as `before`; true where it names no start."""
    try:
        start = recipe.evaluate.before or paths.start_policy(recipe, "train")
    except ConfigError:
        return True
    return start == name if judged == ABSENT else judged == manifest.hash_input(start)


def outcome(recipe: Recipe, source: str, evaluation: Mapping[str, Any] | None) -> Outcome:
    """What is known of the model at `source`."""
    seen = evaluation or {}
    if "off_policy" in seen:
        seen = _by_stored_rows(recipe, seen)
    before, after, proxy = (seen.get(key) or {} for key in ("before", "after", "proxy"))

    def both(name: str) -> tuple[float | None, float | None]:
        return before.get(name), after.get(name)

    return Outcome(
        score=after.get("score"),
        lift=seen.get("lift"),
        lift_low=(seen.get("lift_ci95") or [None])[0],
        prompts=seen.get("n"),
        kl=_kl(recipe, source),
        lengths=both("response_length"),
        well_formed=both("well_formed"),
        repetition=both("repetition"),
        has_proxy=bool(judges.proxy(recipe)),  # whether or not it judged anything
        proxy_low=(proxy.get("lift_ci95") or [None])[0],
        guard_stop=_guard_stop(recipe, source),
    )


def _by_stored_rows(recipe: Recipe, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """What was estimated without generating, as if measured; nothing where it is not to be trusted.

    Nor where the scores, which are those of score.reward, are not the truth's.
    """
    found = evaluation["off_policy"]
    if not found["trust"] or judges.truth(recipe) != recipe.score.reward:
        return {"n": found["prompts"]}
    name = found["reported"]
    gap, after = found["difference"][name], found["after"]["estimates"][name]
    return {
        "n": found["prompts"],
        "lift": gap["score"],
        "lift_ci95": gap["ci95"],
        "after": {"score": after["score"]},
    }


def trained_here(recipe: Recipe, source: str) -> Path | None:
    """The folder of the recipe's training where it wrote `source`."""
    folder = paths.stage_dir(recipe, "train")
    return folder if Path(source).resolve().parent == folder.resolve() else None


def _kl(recipe: Recipe, source: str) -> float | None:
    """Of the last probe, or of the one beside the score for which train's best was taken."""
    folder = trained_here(recipe, source)
    facts = ((manifest.read(folder) if folder else None) or {}).get("facts", {})
    best: Mapping[str, Any] = facts.get("best") or {}
    held = best if Path(source).name == "best" and best else facts.get("metrics", {})
    return held.get(KL)


def _guard_stop(recipe: Recipe, source: str) -> str | None:
    """ "" where training went to its end, why a guard ended it, None where neither is known."""
    folder = trained_here(recipe, source)
    if folder is None:
        return None
    if manifest.read(folder) is not None:
        return ""
    ends = [line for line in journal.read(folder / "journal.jsonl") if line["kind"] == "end"]
    return f"{ends[-1]['action']}, {ends[-1]['reason']}" if ends else None
