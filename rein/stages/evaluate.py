"""Before and after on prompts that training has not seen: their answers, judged by truth and proxy.

What the answers amount to is counted in evaluate_numbers.py. Writes evaluate/evaluation.json and
evaluate/answers.parquet. One model is in memory at a time: both answer, then the rewards judge. A prompt
that cannot be judged is counted and written to rejects.jsonl, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from rein.config import paths
from rein.config.load import write_json
from rein.config.recipe import Recipe
from rein.data.loader import Reject, load_prompts, rejects_kept, write_rejects
from rein.data.parquet import write_rows
from rein.data.schemas import FREE_KEY
from rein.engines.hf import HfEngine
from rein.errors import DataError
from rein.models.actor import load_actor
from rein.models.place import loading
from rein.protocols import Reward
from rein.rewards import build, uses_model
from rein.runtime.memory import free_models
from rein.runtime.seeding import derive
from rein.scorer import open_scorer
from rein.stages import judges, off_policy_evaluation
from rein.stages.evaluate_numbers import Answers, Side, compare
from rein.stages.tokens import FACT, compared, encoder_of
from rein.tracking.console import Console
from rein.types import Trajectory
from rein.validator import answer, scored

ANSWERS = pa.schema(
    [
        *(pa.field(name, pa.string(), metadata={FREE_KEY: b"1"}) for name in ("prompt", "ground_truth")),
        *(pa.field(name, pa.string()) for name in ("where", "data_source", "before", "after")),
        *(pa.field(name, pa.float64()) for name in ("before_score", "after_score")),
        *(pa.field(name, pa.list_(pa.int64())) for name in ("before_ids", "after_ids")),
        *(pa.field(name, pa.string()) for name in ("before_finish_reason", "after_finish_reason")),
    ]
)


def run(recipe: Recipe, console: Console) -> dict[str, Any]:
    """Compare evaluate.before with evaluate.after by evaluate.reward."""
    if not recipe.evaluate.generate:
        return off_policy_evaluation.run(recipe, console)
    folder, specs, beside = paths.stage_dir(recipe, "evaluate"), judges.truth(recipe), judges.proxy(recipe)
    scorer = open_scorer(recipe) if uses_model([*specs, *beside]) else None
    reward, proxy = build(specs, scorer=scorer), build(beside, scorer=scorer) if beside else None
    for note in dict.fromkeys([*reward.notes, *(proxy.notes if proxy else ())]):
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
    before, after = (_judged(sides[name], reward, proxy) for name in models)
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
    if "proxy" in evaluation:
        evaluation["proxy"]["reward"] = [spec.name for spec in beside]
    _write_answers(folder, before, after)
    write_json(folder / "evaluation.json", evaluation)
    _say(evaluation, console)
    beyond -= rejects.keys()
    counts = {"in": len(before) + len(rejects) + len(beyond), "rejected": len(rejects)}
    counts |= ({"beyond_max_prompts": len(beyond)} if beyond else {}) | {"judged": len(before)}
    console.say("rows: " + ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items()))
    return {"rows": counts, **evaluation, FACT: marks["after"]}


def _say(evaluation: dict[str, Any], console: Console) -> None:
    low, high = evaluation["lift_ci95"]
    console.say(
        f"evaluate: {evaluation['before']['score']:.4g} before, {evaluation['after']['score']:.4g} after, "
        f"lift {evaluation['lift']:+.4g} (95 % [{low:+.4g}, {high:+.4g}]), "
        f"win rate {evaluation['win_rate']:.3f} on {evaluation['n']} prompts"
    )


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
    found: list[list[list[Trajectory]]] = []
    for n, temperature, seed, what in _draws(recipe):
        with console.progress(len(prompts), f"{name} {what}") as advance:
            found.append(
                answer(
                    engine,
                    prompts,
                    n=n,
                    temperature=temperature,
                    max_new_tokens=recipe.rollout.max_new_tokens or recipe.data.max_response_length,
                    seed=seed,
                    decode=encoder.decode_response,
                    advance=advance,
                )
            )
    greedy, *sampled = found
    return {
        p.where: Answers(greedy[i][0], [row for draw in sampled for row in draw[i]])
        for i, p in enumerate(prompts)
    }


def _draws(recipe: Recipe) -> Iterator[tuple[int, float, int, str]]:
    """Answers to a prompt, temperature, seed and name of each pass over the prompts: greedy, then sampled."""
    evaluate, seed = recipe.evaluate, derive(recipe.seed, "evaluate")
    yield 1, 0.0, seed, "greedy"
    for i in range(evaluate.seeds if evaluate.pass_k else 0):
        of = derive(recipe.seed, "evaluate", i) if i else seed
        yield evaluate.pass_k, evaluate.temperature, of, f"sampled {i + 1}/{evaluate.seeds}"


def _judged(side: Side, reward: Reward, proxy: Reward | None) -> Side:
    """The same answers with scores, from one call of each reward; the proxy reads greedy answers alone."""
    rows = iter(scored([row for one in side.values() for row in (one.greedy, *one.samples)], reward))
    greedy = [one.greedy for one in side.values()]
    beside = iter([None] * len(greedy) if proxy is None else proxy(greedy))
    return {
        where: Answers(next(rows), [next(rows) for _ in one.samples], next(beside))
        for where, one in side.items()
    }


def _known(answers: Answers) -> bool:
    return all(row.score is not None for row in (answers.greedy, *answers.samples))


def _names(specs: Sequence[Any]) -> str:
    return ", ".join(spec.name for spec in specs)


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
