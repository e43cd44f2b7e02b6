"""Claims about what is computed once: a second run pays nothing, and what changes the numbers pays again."""

import dataclasses
import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import own_log_probs, random_trajectories

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.errors import ConfigError, DataError
from rein.models.actor import load_actor
from rein.models.tiny import make_tiny
from rein.runtime.clock import Clock
from rein.stages import pipeline, train
from rein.stages.train_frozen import recomputed
from rein.tracking.console import Console
from rein.types import Trajectory

N = 12
ROWS = random_trajectories(N, behavior=False)
SIZES = [
    *("data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1", "actor.optim.lr=1e-3"),
    *("data.holdout_fraction=0", "data.max_response_length=9", "trainer.critic_warmup=0", "threads=1"),
    *("trainer.logger=[jsonl]", "trainer.total_training_steps=1"),
]
QUIET = Console(quiet=True)


def of(rows: Sequence[Trajectory], model: Path, out: Path, *words: str) -> Recipe:
    out.mkdir(parents=True, exist_ok=True)
    write_rows(out / "rows.parquet", [trajectory_row(row) for row in rows], TRAJECTORIES, {})
    where = [f"model.path={model}", f"data.train_files={out}/rows.parquet", f"out={out}"]
    keys = {word.partition("=")[0] for word in words}
    return load(None, [*where, *(size for size in SIZES if size.partition("=")[0] not in keys), *words])[0]


def counts(rows: Sequence[Trajectory], model: Path, out: Path, *words: str) -> dict[str, Any]:
    facts: dict[str, Any] = train.run(of(rows, model, out, *words), QUIET)["cache"]["ref_log_probs"]
    return facts


@pytest.fixture
def paid(tiny: Path, tmp_path: Path) -> Path:
    """A folder of runs, one of which has computed the reference's log-probs of ROWS."""
    assert counts(ROWS, tiny, tmp_path / "first") == {"hits": 0, "misses": N}
    assert (tmp_path / "rein-cache").is_dir()
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["seed=7"],
        ["data.train_batch_size=6", "actor.ppo_mini_batch_size=2", "actor.ppo_max_token_len_per_gpu=40"],
        ["actor.optim.lr=1e-4", "algorithm.adv_estimator=reinforce_plus_plus"],
        ["model.lora_rank=2"],
    ],
    ids=["seed", "sizes", "method", "lora"],
)
def test_another_run_of_the_same_rows_and_reference_computes_none(
    paid: Path, tiny: Path, words: list[str]
) -> None:
    assert counts(ROWS, tiny, paid / "second", *words) == {"hits": N, "misses": 0}


def test_neither_order_nor_place_nor_new_scores_cost_anything_and_new_rows_only_themselves(
    paid: Path, tiny: Path
) -> None:
    shuffled = random.Random(0).sample(ROWS, N)
    rescored = [dataclasses.replace(row, score=0.5 + i % 2) for i, row in enumerate(shuffled)]
    moved = Path(shutil.copytree(tiny, paid / "moved model"))
    assert counts(rescored, moved, paid / "second") == {"hits": N, "misses": 0}
    more = [*random_trajectories(5, seed=9, behavior=False), *ROWS]
    assert counts(more, tiny, paid / "third") == {"hits": N, "misses": 5}


def test_other_weights_a_temperature_a_token_or_the_precision_cost_what_they_change(
    paid: Path, tiny: Path, other_tiny: Path
) -> None:
    assert counts(ROWS, other_tiny, paid / "weights") == {"hits": 0, "misses": N}
    assert counts(ROWS, tiny, paid / "precision", "model.dtype=float64") == {"hits": 0, "misses": N}
    warm = [dataclasses.replace(ROWS[0], temperature=0.7), *ROWS[1:]]
    assert counts(warm, tiny, paid / "temperature") == {"hits": N - 1, "misses": 1}
    ids = ROWS[0].response_ids.copy()
    ids[0] = (ids[0] + 1) % 10
    edited = [dataclasses.replace(ROWS[0], response_ids=ids), *ROWS[1:]]
    assert counts(edited, tiny, paid / "token") == {"hits": N - 1, "misses": 1}


def test_a_folder_of_ones_own_is_used_and_no_other(tiny: Path, tmp_path: Path) -> None:
    words = (f"cache={tmp_path}/mine",)
    assert counts(ROWS, tiny, tmp_path / "a" / "run", *words)["misses"] == N
    assert counts(ROWS, tiny, tmp_path / "b" / "run", *words)["hits"] == N
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["run"]


def test_the_counts_are_printed_and_in_the_manifest_and_a_template_pays_again(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(model: Path, name: str) -> tuple[dict[str, int], str]:
        pipeline.run_stage("train", of(ROWS, model, tmp_path / name), Console())
        folder = tmp_path / name / "train"
        found: dict[str, int] = json.loads((folder / "manifest.json").read_text())["facts"]["cache"][
            "ref_log_probs"
        ]
        return found, capsys.readouterr().out

    found, said = run(tiny, "one")
    assert found == {"hits": 0, "misses": N}
    assert f"reference log-probs: 0 rows from the cache, {N} computed" in said
    found, said = run(tiny, "two")
    assert found == {"hits": N, "misses": 0}
    assert f"reference log-probs: {N} rows from the cache, 0 computed" in said
    changed = Path(shutil.copytree(tiny, tmp_path / "changed"))
    (changed / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    assert run(changed, "three")[0] == {"hits": 0, "misses": N}


def test_cached_numbers_train_to_the_same_weights_bit_for_bit(paid: Path, tiny: Path) -> None:
    train.run(of(ROWS, tiny, paid / "second"), QUIET)
    one, other = ((paid / run / "train/last/model.safetensors").read_bytes() for run in ("first", "second"))
    assert one == other


# data.behavior=recomputed


def words_for(model: Path) -> tuple[str, str]:
    return "data.behavior=recomputed", f"data.behavior_model={model}"


def test_recomputed_behavior_is_what_that_model_gives_at_the_rows_temperature(
    tiny: Path, other_tiny: Path, tmp_path: Path
) -> None:
    rows = random_trajectories(N, temperatures=(1.0, 0.6))  # what they have stored is not used
    recipe, found = of(rows, tiny, tmp_path / "run", *words_for(other_tiny)), dict[str, Any]()
    done = recomputed(recipe, QUIET, load_actor(str(tiny)).tokenizer, rows, found, Clock())
    model = load_actor(str(other_tiny)).model
    for row, old in zip(done, rows, strict=True):
        assert row.behavior_log_probs is not None
        with torch.no_grad():
            wanted = own_log_probs(model, row, row.temperature).numpy()  # type: ignore[arg-type]
        np.testing.assert_allclose(row.behavior_log_probs, wanted, atol=1e-5)
        assert row.key == old.key
    assert found == {"behavior_log_probs": {"hits": 0, "misses": N}}


def test_recomputed_behavior_serves_methods_that_need_it_and_is_paid_once(
    tiny: Path, other_tiny: Path, tmp_path: Path
) -> None:
    words = ("algorithm.method=topr", *words_for(other_tiny))
    for run, expected in (("one", {"hits": 0, "misses": N}), ("two", {"hits": N, "misses": 0})):
        facts = train.run(of(ROWS, tiny, tmp_path / run, *words), QUIET)
        assert facts["cache"]["behavior_log_probs"] == expected
    with pytest.raises(DataError, match="12 of 12 rows have none"):
        train.run(of(ROWS, tiny, tmp_path / "three", "algorithm.method=topr"), QUIET)


def test_recomputed_by_the_start_policy_itself_gives_ratios_of_one(tiny: Path, tmp_path: Path) -> None:
    train.run(of(ROWS, tiny, tmp_path / "run", *words_for(tiny)), QUIET)
    lines = [json.loads(line) for line in (tmp_path / "run/train/metrics.jsonl").read_text().splitlines()]
    flat = [line.get("metrics", line) for line in lines]
    first = next(line for line in flat if "training/log_prob_diff_max" in line)
    assert first["training/log_prob_diff_max"] < 1e-5
    assert first["rollout_corr/raw_mean"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.behavior=recomputed"], "give data.behavior_model"),
        (["data.behavior_model=m"], "reads no model; write recomputed"),
        (["data.behavior=unknown", "data.behavior_model=m"], "data.behavior unknown reads no model"),
    ],
)
def test_the_two_keys_go_together(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, ["model.path=m", "data.train_files=f.parquet", *words])


def test_a_model_with_other_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", seed=0, hidden=32, layers=1)
    body = json.loads((other / "tokenizer.json").read_text())
    vocabulary = body["model"]["vocab"]
    one, two = list(vocabulary)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(body))
    with pytest.raises(ConfigError, match="has other tokens than the model"):
        train.run(of(ROWS, tiny, tmp_path / "run", *words_for(other)), QUIET)
