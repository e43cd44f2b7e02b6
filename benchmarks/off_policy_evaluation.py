"""Off-policy evaluation against the truth: do its intervals hold, when does it say trust, does it rank?

    python benchmarks/off_policy_evaluation.py --out runs/ope                      # all, then the report
    python benchmarks/off_policy_evaluation.py --out runs/ope --only demo          # in parts; then
    python benchmarks/off_policy_evaluation.py --out runs/ope --only report

Two graphs of random_walks.py and the demo; on each, twenty checkpoints of a PPO run from next to the behavior
policy to far from it (off_policy_policies.py). 200 times 500 prompts are drawn with 8 answers each, sampled
from the behavior policy, and every checkpoint is judged by these alone. Prompts are drawn with replacement:
the truth is the mean over all prompts of the pool. Draws that are done are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from off_policy_policies import Pool, pool_of
from results_io import table, write

from rein.functional.kl import off_policy_kl
from rein.functional.masked import masked_mean
from rein.functional.off_policy_evaluation import (
    Estimate,
    clustered,
    log_ratios,
    row_estimates,
    trust,
    with_missing,
)

TASKS = ("walks 10", "walks 11", "demo")
DRAWS, PROMPTS, ANSWERS = 200, 500, 8
NEAR, NARROW = 0.02, 0.15  # kl/behavior, width of an interval
REPORTED = "control_variate"


def draw(pool: Pool, seed: int) -> tuple[Tensor, Tensor]:
    """The rows of a draw, and their prompts' numbers."""
    generator = torch.Generator().manual_seed(seed)
    asked = torch.randint(len(pool.drawn), (PROMPTS,), generator=generator).tolist()
    rows = [pool.drawn[i][torch.randperm(len(pool.drawn[i]), generator=generator)[:ANSWERS]] for i in asked]
    return torch.cat(rows), torch.arange(PROMPTS).repeat_interleave(ANSWERS)


def judged(pool: Pool, seed: int) -> list[dict[str, Any]]:
    """What one draw says of every policy."""
    rows, groups = draw(pool, seed)
    mask = pool.mask[rows]
    width = int(mask.sum(1).max())
    mask = mask[:, :width]
    rewards = torch.zeros(mask.shape, dtype=torch.float64)
    rewards[torch.arange(len(rows)), mask.sum(1) - 1] = pool.scores[rows]
    behavior, values = pool.behavior[rows, :width], pool.values[rows, :width]
    found = []
    for actor in pool.actors:
        log_w = log_ratios(actor[rows, :width], behavior, mask)
        terms = row_estimates(log_w, rewards, mask, groups, values)
        estimates = {name: list(clustered(each, groups)) for name, each in terms.items()}
        zeros, said = torch.zeros_like(log_w), trust(log_w, terms[REPORTED], groups)
        least = pool.scores[rows].min().item()
        own = Estimate(*estimates[REPORTED])
        estimates[REPORTED] = list(with_missing(own, said.mean_weight.value, least))
        found.append(
            {
                "estimates": estimates,
                "trust": said.trusted,
                "ess": said.ess,
                "pareto_k": said.pareto_k,
                "products_k": said.products_k,
                "mean_weight": said.mean_weight.value,
                "kl": masked_mean(off_policy_kl(log_w, zeros, zeros), mask).item(),
            }
        )
    return found


def run(name: str, out: Path, seconds: float) -> None:
    """The draws of a task that are not done yet, for so long at most."""
    pool, file, started = pool_of(name, out), out / f"{name.replace(' ', '')}.jsonl", time.monotonic()
    done = len(file.read_text().splitlines()) if file.exists() else 0
    with file.open("a") as lines:
        for seed in range(done, DRAWS):
            if time.monotonic() - started > seconds:
                print(f"{name}: {seed} of {DRAWS} draws done, the same command goes on", flush=True)
                return
            lines.write(json.dumps(judged(pool, seed)) + "\n")
    print(f"{name}: {DRAWS} draws done", flush=True)


def policies(name: str, out: Path) -> list[dict[str, Any]]:
    """What all draws together say of each policy of a task."""
    pool = pool_of(name, out)
    draws = [json.loads(line) for line in (out / f"{name.replace(' ', '')}.jsonl").read_text().splitlines()]
    rows = []
    for i, truth in enumerate(pool.truth):
        own = [found[i] for found in draws]
        row: dict[str, Any] = {
            "task": name,
            "policy": pool.names[i],
            "truth": truth,
            "truth_error": pool.error[i],
        }
        row |= {
            key: median([each[key] for each in own])
            for key in ("kl", "ess", "pareto_k", "products_k", "mean_weight")
        }
        row["trusted"] = mean([each["trust"] for each in own])
        row["trusted_narrow"] = mean([each["trust"] and wide(each) <= NARROW for each in own])
        row["draws"] = len(own)
        for key in own[0]["estimates"]:
            ends = [each["estimates"][key] for each in own]
            hold = [low <= truth <= high for _, low, high in ends]
            row[key] = {
                "bias": mean([value for value, _, _ in ends]) - truth,
                "width": median([high - low for _, low, high in ends]),
                "coverage": mean(hold),
                "coverage_trusted": mean([h for h, each in zip(hold, own, strict=True) if each["trust"]]),
            }
        rows.append(row)
    return rows


def ranks(name: str, out: Path) -> dict[str, float]:
    """Spearman's correlation of each estimator with the truth over all policies, mean over draws."""
    truth = torch.tensor(pool_of(name, out).truth, dtype=torch.float64)
    found: dict[str, list[float]] = {}
    for line in (out / f"{name.replace(' ', '')}.jsonl").read_text().splitlines():
        draws = json.loads(line)
        for key in draws[0]["estimates"]:
            said = torch.tensor([each["estimates"][key][0] for each in draws], dtype=torch.float64)
            found.setdefault(key, []).append(spearman(said, truth))
        low = torch.tensor([each["estimates"][REPORTED][1] for each in draws], dtype=torch.float64)
        found.setdefault("lower end", []).append(spearman(low, truth))
    return {key: mean(each) for key, each in found.items()}


def spearman(one: Tensor, other: Tensor) -> float:
    places = torch.stack([each.argsort().argsort().double() for each in (one, other)])
    return float(torch.corrcoef(places)[0, 1])


def wide(each: dict[str, Any]) -> float:
    _, low, high = each["estimates"][REPORTED]
    return float(high - low)


def mean(values: list[Any]) -> float:
    return sum(values) / len(values) if values else math.nan


def median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).nanmedian())


def verdicts(rows: list[dict[str, Any]], ranked: dict[str, dict[str, float]]) -> str:
    """What was asked for, and what came."""
    said = [row for row in rows if row["trusted"] * row["draws"] >= 20]  # few trusted draws tell nothing
    covered = [row[REPORTED]["coverage_trusted"] for row in said]
    off = [row for row in said if not 0.9 <= row[REPORTED]["coverage_trusted"] <= 0.99]
    weights = [row["trusted"] * row["draws"] for row in said]
    pooled = sum(c * w for c, w in zip(covered, weights, strict=True)) / sum(weights)
    near = [row for row in rows if row["kl"] <= NEAR]
    good = [row for row in near if row["trusted_narrow"] >= 0.5]
    far = [row for row in rows if row["trusted"] < 0.5]
    within = f"{len(said) - len(off)} of {len(said)} policies within 90 to 99 %"
    missed = [f"{row['task']} {row['policy']} {row[REPORTED]['coverage_trusted']:.1%}" for row in off]
    lines = [
        f"- Where it says trust, 95 % intervals hold the truth in {pooled:.1%} of the draws of all policies, "
        f"in {min(covered):.1%} to {max(covered):.1%} of those of one; {within}"
        + (f"; not {', '.join(missed)}." if missed else "."),
        f"- kl/behavior up to {NEAR}: trusted with an interval at most {NARROW} wide for {len(good)} of "
        f"{len(near)} policies, in {mean([row['trusted_narrow'] for row in near]):.0%} of their draws.",
        f"- Trust is refused in most draws for {len(far)} of {len(rows)} policies.",
        "- Rank correlation with the truth over 20 checkpoints: "
        + ", ".join(f"{task} {found[REPORTED]:.3f}" for task, found in ranked.items())
        + ".",
    ]
    return "\n".join(lines)


def report(out: Path, tasks: list[str]) -> None:
    rows = [row for task in tasks for row in policies(task, out)]
    ranked = {task: ranks(task, out) for task in tasks}
    parts = [
        (__doc__ or "").partition("\n\n")[0],
        (__doc__ or "").rpartition("\n\n")[2],
        verdicts(rows, ranked),
    ]
    names = [key for key, value in rows[0].items() if isinstance(value, dict)]
    head = [
        "policy",
        "truth",
        "kl/behavior",
        "ESS",
        "k of terms",
        "k of products",
        "mean product",
        "trusted",
        "width",
        "bias",
    ]
    head += ["holds, where trusted", *(f"holds: {name.replace('_', ' ')}" for name in names)]
    for task in tasks:
        body = []
        for row in (row for row in rows if row["task"] == task):
            own = row[REPORTED]
            cells = [row["policy"], f"{row['truth']:.3f}", f"{row['kl']:.4f}", f"{row['ess']:.0f}"]
            cells += [
                f"{row['pareto_k']:.2f}",
                f"{row['products_k']:.2f}",
                f"{row['mean_weight']:.3f}",
                f"{row['trusted']:.0%}",
            ]
            cells += [f"{own['width']:.3f}", f"{own['bias']:+.4f}", f"{own['coverage_trusted']:.1%}"]
            body.append([*cells, *(f"{row[name]['coverage']:.1%}" for name in names)])
        shown = ", ".join(f"{key.replace('_', ' ')} {value:.3f}" for key, value in ranked[task].items())
        error = max(row["truth_error"] for row in rows if row["task"] == task)
        parts += [f"## {task}", table(head, body), f"Rank correlation: {shown}."]
        what = "has a standard error of" if task == "demo" else "leaves out probability of"
        parts += [f"The truth {what} at most {error:.1g}."]
    parts += ["Width, bias and the first column of holds are of the control variate; medians over draws."]
    settings = {"draws": DRAWS, "prompts": PROMPTS, "answers": ANSWERS, "ranks": ranked}
    write("off_policy_evaluation", settings, rows, "\n\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/ope"))
    parser.add_argument("--only", choices=[*TASKS, "report"], nargs="+", default=[*TASKS, "report"])
    parser.add_argument("--seconds", type=float, default=math.inf, help="for draws, of each task")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name in TASKS:
        if name in arguments.only:
            run(name, arguments.out, arguments.seconds)
    if "report" in arguments.only:
        report(
            arguments.out,
            [name for name in TASKS if (arguments.out / f"{name.replace(' ', '')}.jsonl").exists()],
        )


if __name__ == "__main__":
    main()
