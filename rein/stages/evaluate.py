"""Before and after on prompts that training has not seen: greedy score, pass@k, and how sure the lift is.

Writes evaluate/evaluation.json and evaluate/answers.parquet. One model is in memory at a time: both answer,
then the reward judges. A prompt that cannot be judged is counted and written to rejects.jsonl, never
dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch

from rein.config import paths
from rein.config.load import write_json
from rein.config.recipe import Recipe
from rein.data.loader import Reject, load_prompts, rejects_kept, write_rejects
from rein.data.parquet import write_rows
from rein.data.schemas import FREE_KEY
from rein.engines.hf import HfEngine
from rein.errors import DataError
from rein.functional.statistics import RESAMPLES, paired_bootstrap, pass_at_k, wilson
from rein.models.actor import load_actor
from rein.models.place import loading
from rein.protocols import Reward
from rein.rewards import build, uses_model
from rein.runtime.memory import free_models
from rein.runtime.seeding import derive
from rein.scorer import open_scorer
from rein.stages import off_policy_evaluation
from rein.stages.tokens import FACT, compared, encoder_of
from rein.tracking.console import Console
from rein.types import Trajectory
from rein.validator import answer, scored, shape

ANSWERS = pa.schema(
    [
        *(pa.field(name, pa.string(), metadata={FREE_KEY: b"1"}) for name in ("prompt", "ground_truth")),
        *(pa.field(name, pa.string()) for name in ("where", "data_source", "before", "after")),
        *(pa.field(name, pa.float64()) for name in ("before_score", "after_score")),
        *(pa.field(name, pa.list_(pa.int64())) for name in ("before_ids", "after_ids")),
        *(pa.field(name, pa.string()) for name in ("before_finish_reason", "after_finish_reason")),
    ]
)


@dataclass(slots=True)
class Answers:
    """What one model said to one prompt."""

    greedy: Trajectory
    samples: list[Trajectory]


Side = dict[str, Answers]  # by the prompt's place in the file


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Compare evaluate.before with evaluate.after by evaluate.reward."""
    if not recipe.evaluate.generate:
        return off_policy_evaluation.run(recipe, console)
    folder, specs = paths.stage_dir(recipe, "evaluate"), recipe.evaluate.reward or recipe.score.reward
    needed = uses_model(specs)
    scorer = open_scorer(recipe) if needed else None
    reward = build(specs, scorer=scorer)
    for note in reward.notes:
        console.say(note)
    models = {
        "before": recipe.evaluate.before or paths.start_policy(recipe, "train"),
        "after": recipe.evaluate.after or paths.trained_actor(recipe),
    }
    rejects: dict[str, Reject] = {}
    beyond, marks = set[str](), dict[str, dict[str, str]]()
    sides: dict[str, Side] = {}
    for name, path in models.items():
        sides[name] = _answers(recipe, console, name, path, rejects, beyond, marks)
        free_models()
    if changed := [what for what, mark in marks["before"].items() if marks["after"][what] != mark]:
        console.say(
            f"warning: evaluate.before and evaluate.after differ in {' and '.join(changed)}, so they do not "
            "answer the same tokens; give both folders the same tokenizer files"
        )
    before, after = (_judged(sides[name], reward) for name in models)
    if scorer is not None:
        scorer.keep()
    for where in {**before, **after}:
        one, other = before.get(where), after.get(where)
        if one is None or other is None or not (_known(one) and _known(other)):
            rejects.setdefault(where, Reject(where, f"{_names(specs)} cannot judge it", "no score"))
    before = {where: one for where, one in before.items() if where not in rejects}
    after = {where: after[where] for where in before}
    folder.mkdir(parents=True, exist_ok=True)
    write_rejects(folder / "rejects.jsonl", rejects.values())
    if not before:
        raise DataError(
            f"{', '.join(paths.evaluate_files(recipe))}: none of {len(rejects)} prompts can be judged; "
            "give ground truths, or another evaluate.reward"
        )
    if rejects:
        console.say(f"evaluate: {len(rejects)} prompts left out; first: {next(iter(rejects.values()))}")
    evaluation = compare(recipe, before, after)
    evaluation |= {"reward": [spec.name for spec in specs], "models": models}
    _write_answers(folder, before, after)
    write_json(folder / "evaluation.json", evaluation)
    low, high = evaluation["lift_ci95"]
    console.say(
        f"evaluate: {evaluation['before']['score']:.4g} before, {evaluation['after']['score']:.4g} after, "
        f"lift {evaluation['lift']:+.4g} (95 % [{low:+.4g}, {high:+.4g}]) on {len(before)} prompts"
    )
    beyond -= rejects.keys()
    counts = {"in": len(before) + len(rejects) + len(beyond), "rejected": len(rejects)}
    counts |= ({"beyond_max_prompts": len(beyond)} if beyond else {}) | {"judged": len(before)}
    console.say("rows: " + ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items()))
    return {"rows": counts, **evaluation, FACT: marks["after"]}


def _answers(
    recipe: Recipe,
    console: Console,
    name: str,
    path: str,
    rejects: dict[str, Reject],
    beyond: set[str],
    marks: dict[str, dict[str, str]],
) -> Side:
    """A greedy and pass_k sampled answers to every prompt; nothing uses the model when this returns.

    `rejects` and `beyond` are told which prompts were left out, `marks` what the ids are of.
    """
    evaluate = recipe.evaluate
    where = f"evaluate.{name}"
    actor = load_actor(path, where=where, **loading(recipe.model))
    encoder = encoder_of(actor, recipe)
    marks[name] = compared(encoder, console, path)
    with rejects_kept(paths.stage_dir(recipe, "evaluate") / "rejects.jsonl"):
        loaded = load_prompts(paths.evaluate_files(recipe), encoder, recipe.data)
    for note in loaded.notes:
        console.say(f"data: {note}")
    rejects.update((reject.where, reject) for reject in loaded.rejects)
    prompts = loaded.rows[: evaluate.max_prompts]
    beyond.update(prompt.where for prompt in loaded.rows[len(prompts) :])
    if len(prompts) < len(loaded.rows):
        console.say(
            f"evaluate: the first {len(prompts)} of {len(loaded.rows)} prompts (evaluate.max_prompts)"
        )
    engine = HfEngine(
        actor.model,
        actor.tokenizer,
        actor.stop_ids,
        batch_size=evaluate.batch_size,
        stop_texts=recipe.rollout.stop,
    )
    room = recipe.rollout.max_new_tokens or recipe.data.max_response_length
    seed = derive(recipe.seed, "evaluate")
    found: list[list[list[Trajectory]]] = []
    for n, temperature, what in ((1, 0.0, "greedy"), (evaluate.pass_k, evaluate.temperature, "sampled")):
        if n == 0:
            found.append([[] for _ in prompts])
            continue
        with console.progress(len(prompts), f"{name} {what}") as advance:
            found.append(
                answer(
                    engine,
                    prompts,
                    n=n,
                    temperature=temperature,
                    max_new_tokens=room,
                    seed=seed,
                    decode=encoder.decode_response,
                    advance=advance,
                )
            )
    greedy, samples = found
    return {p.where: Answers(greedy[i][0], samples[i]) for i, p in enumerate(prompts)}


def _judged(side: Side, reward: Reward) -> Side:
    """The same answers with scores, from one call of the reward."""
    rows = iter(scored([row for one in side.values() for row in (one.greedy, *one.samples)], reward))
    return {where: Answers(next(rows), [next(rows) for _ in one.samples]) for where, one in side.items()}


def _known(answers: Answers) -> bool:
    return all(row.score is not None for row in (answers.greedy, *answers.samples))


def _names(specs: Sequence[Any]) -> str:
    return ", ".join(spec.name for spec in specs)


def compare(recipe: Recipe, before: Side, after: Side) -> dict[str, Any]:
    """The numbers of evaluation.json; both sides hold the same prompts, all with scores."""
    scores = {"before": _greedy_scores(before), "after": _greedy_scores(after)}
    binary = all(bool(((s == 0) | (s == 1)).all()) for s in scores.values())
    sources: dict[str, list[int]] = {}
    for index, one in enumerate(before.values()):
        sources.setdefault(one.greedy.data_source or "(none)", []).append(index)
    by_source = {
        source: _lift({name: values[torch.tensor(rows)] for name, values in scores.items()}, recipe.seed)
        for source, rows in sorted(sources.items())
    }
    overall = _lift(scores, recipe.seed)
    return {
        "before": _side(before, scores["before"], binary=binary),
        "after": _side(after, scores["after"], binary=binary),
        "lift": overall["lift"],
        "lift_ci95": overall["lift_ci95"],
        "by_data_source": by_source,
        "n": len(before),
        "pass_k": recipe.evaluate.pass_k,
        "temperature": recipe.evaluate.temperature,
        "resamples": RESAMPLES,
        "seed": recipe.seed,
    }


def _greedy_scores(side: Side) -> torch.Tensor:
    return torch.tensor([one.greedy.score for one in side.values()], dtype=torch.float64)


def _lift(scores: Mapping[str, torch.Tensor], seed: int) -> dict[str, Any]:
    means = {name: float(values.mean()) for name, values in scores.items()}
    interval = paired_bootstrap(scores["before"], scores["after"], seed=seed)
    n = len(scores["before"])
    return {"n": n, **means, "lift": means["after"] - means["before"], "lift_ci95": list(interval)}


def _side(side: Side, scores: torch.Tensor, *, binary: bool) -> dict[str, Any]:
    """One model's numbers. `accuracy` is the mean score where scores are right or wrong, else null."""
    n, mean = len(scores), float(scores.mean())
    facts: dict[str, Any] = {"accuracy": mean if binary else None, "n": n, "score": mean}
    if binary:
        facts["accuracy_ci95"] = list(wilson(float(scores.sum()), n))
        facts |= _pass_at(side)
    return facts | shape([one.greedy for one in side.values()])


def _pass_at(side: Side) -> dict[str, float]:
    """pass@1, 2, 4, ... up to the number of samples."""
    drawn = len(next(iter(side.values())).samples)
    right = torch.tensor([sum(row.score == 1 for row in one.samples) for one in side.values()])
    ks = sorted({*(1 << i for i in range(drawn.bit_length())), drawn} - {0})
    return {f"pass@{k}": float(pass_at_k(right, drawn, k).mean()) for k in ks}


def _write_answers(folder: Any, before: Side, after: Side) -> None:
    rows: list[dict[str, Any]] = []
    for where, one in before.items():
        prompt = one.greedy
        row: dict[str, Any] = {"where": where, "prompt": prompt.messages, "data_source": prompt.data_source}
        row["ground_truth"] = prompt.ground_truth
        for name, said in (("before", one.greedy), ("after", after[where].greedy)):
            row |= {name: said.response, f"{name}_score": said.score, f"{name}_ids": said.response_ids}
            row[f"{name}_finish_reason"] = said.finish_reason
        rows.append(row)
    write_rows(folder / "answers.parquet", rows, ANSWERS)
