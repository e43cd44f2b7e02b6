"""How evenly an update's tokens fall on many ranks: the cut that training makes, without a model.

    python benchmarks/balance.py

Rows of log-normal lengths in mini-batches of 64 rows a rank, cut under a token budget into micro-batches for
16 and 256 ranks, as `Learner.backward` does. Imbalance is the largest rank's tokens over the mean, less one:
what the others wait for. Beside it the same rows dealt out in turn, each rank's own cut, as samplers do.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from results_io import table, write

from rein.data.batches import row_batches, shared_out

ROWS_A_RANK, BUDGET, BATCHES = 64, 8192, 5
SHAPES = {
    "short answers": (100, 250, 0.6),
    "long answers": (200, 1500, 0.8),
}  # prompt, median response, sigma
LONGEST = 8000


@dataclass(frozen=True)
class Row:
    prompt_ids: np.ndarray
    response_ids: np.ndarray


def drawn(count: int, shape: tuple[float, float, float], seed: int) -> list[Row]:
    prompt, median, sigma = shape
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(np.log(median), sigma, count), 1, LONGEST - prompt).astype(int)
    prompts = np.clip(draw.lognormal(np.log(prompt), 0.4, count), 10, 2 * prompt).astype(int)
    return [Row(np.zeros(a, np.int64), np.zeros(b, np.int64)) for a, b in zip(prompts, lengths, strict=True)]


def loads(rows: list[Row], ranks: int) -> tuple[np.ndarray, int]:
    """Tokens of each rank, and how many micro-batches each has."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    parts = row_batches(rows, BUDGET, share=False, ranks=ranks)  # type: ignore[arg-type]
    costs = [sum(lengths[i] for i in part) for part in parts]
    shares = shared_out(costs, ranks)
    assert len({len(own) for own in shares}) == 1, "ranks make as many passes each"
    assert sorted(i for own in shares for n in own for i in parts[n]) == list(range(len(rows)))
    return np.array([sum(costs[n] for n in own) for own in shares]), len(shares[0])


def imbalance(tokens: np.ndarray) -> float:
    return float(tokens.max() / tokens.mean() - 1)


def measured(name: str, ranks: int) -> dict[str, Any]:
    found, dealt, passes = [], [], 0
    for seed in range(BATCHES):
        rows = drawn(ROWS_A_RANK * ranks, SHAPES[name], seed)
        tokens, passes = loads(rows, ranks)
        found.append(imbalance(tokens))
        lengths = np.array([len(row.prompt_ids) + len(row.response_ids) for row in rows])
        dealt.append(imbalance(np.array([lengths[rank::ranks].sum() for rank in range(ranks)])))
    row = {"lengths": name, "ranks": ranks, "rows": ROWS_A_RANK * ranks, "passes": passes}
    return row | {"imbalance": max(found), "dealt": max(dealt)}


def main() -> None:
    rows = [measured(name, ranks) for name in SHAPES for ranks in (16, 256)]
    head = ["lengths", "ranks", "rows", "passes a rank", "imbalance", "rows dealt out in turn"]
    body = [
        [r["lengths"], r["ranks"], r["rows"], r["passes"], f"{r['imbalance']:.2%}", f"{r['dealt']:.2%}"]
        for r in rows
    ]
    text = (
        f"The worst of {BATCHES} mini-batches of {ROWS_A_RANK} rows a rank, budget {BUDGET} tokens, lengths "
        f"log-normal and at most {LONGEST}.\n\n{table(head, body)}"
    )
    write("balance", {"rows_a_rank": ROWS_A_RANK, "budget": BUDGET, "batches": BATCHES}, rows, text)
    print(text)


if __name__ == "__main__":
    main()
