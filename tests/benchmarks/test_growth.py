"""The batches of the growth benchmark: every size has the same lengths, and no copy shares with another."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import growth
import growth_run
from update_run import experience_of, rows_of

from rein.sharing import families

VOCABULARY, ANSWERS = 500, 4


def stored() -> dict[str, np.ndarray]:
    """Five prompts with four answers each, of any lengths."""
    draw = np.random.default_rng(0)
    lengths, answers = draw.integers(16, 40, 5).repeat(ANSWERS), draw.integers(1, 12, 5 * ANSWERS)
    prompts = [draw.integers(0, VOCABULARY, n) for n in lengths[::ANSWERS]]
    batch = {"plen": lengths, "rlen": answers, "group": np.arange(5).repeat(ANSWERS)}
    batch["prompt"] = np.concatenate([prompts[group] for group in batch["group"]])
    batch["resp"] = draw.integers(0, VOCABULARY, answers.sum())
    floats = ("old_logp", "values", "adv", "ret")
    return batch | {name: draw.normal(size=answers.sum()).astype(np.float32) for name in floats}


def test_a_larger_batch_is_the_small_one_again_and_again_but_for_its_ids() -> None:
    once, often = (growth_run.copied(stored(), copies, VOCABULARY) for copies in (1, 7))
    for name in ("plen", "rlen", "old_logp", "ret"):
        assert np.array_equal(often[name], np.tile(once[name], 7))
    rows = rows_of(often, limit=0, n=None)
    assert [len(family) for family in families(rows)] == [ANSWERS] * (7 * growth_run.GROUPS)
    assert experience_of(often, rows).returns.shape == (len(rows), max(once["rlen"]))
    assert all(row.response_ids.min() >= 0 and row.response_ids.max() < VOCABULARY for row in rows)


def test_the_groups_taken_have_the_average_of_all() -> None:
    batch = stored() | {"plen": np.full(5 * ANSWERS, 6), "rlen": np.array([4, 5, 6, 20, 15]).repeat(ANSWERS)}
    assert growth_run.typical(batch) == [0, 2, 3]


def test_the_long_row_is_one_row() -> None:
    (row,) = rows_of(growth_run.one_row(300, VOCABULARY), limit=0, n=None)
    assert (len(row.prompt_ids), len(row.response_ids)) == (growth_run.LONG_PROMPT, 300)


def test_the_report_says_how_far_cost_and_memory_move() -> None:
    def row(part: str, tokens: int, cost: float, peak: int) -> growth.Row:
        same = {"part": part, "precision": "fast", "rows": 4, "micro_batches": 2, "budget": 1024}
        found = {"tokens": tokens, "cpu_ms_per_token": cost, "cpu_seconds": 1.0, "peak_rss_mb": peak}
        return same | found | {"checkpointing": False}

    text = growth.text_of(
        [row("size", 2000, 5.0, 4000), row("size", 64000, 5.2, 4100), row("long", 8100, 9.0, 13000)], ["fast"]
    )
    assert "`fast`, 32 times the tokens: the dearest size costs 4.0 % more" in text
    assert "2.5 % above the smallest" in text
    assert "0 of 1 peaks are within 12 GB" in text
    assert growth.spread([3.0, 2.0]) == pytest.approx(0.5)
