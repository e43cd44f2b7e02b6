"""What else trains: pairs alone, LoRA, cloning, KL in reward, the user's function, verl's GSM8K layout."""

import json
import math
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from e2e_run import OFFLINE, manifest, metrics, recipe, rein, same_weights, weights, write_recipe

from rein.models.tiny import make_tiny

PLAIN = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, room, *prompts = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
said = []
for prompt in prompts:
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, do_sample=False, max_new_tokens=int(room))
    said.append(out[0, ids["input_ids"].shape[1]:].tolist())
assert not any(name.partition(".")[0] in ("rein", "peft") for name in sys.modules)
print(json.dumps(said))
"""


def stored(whole: Path, data: Path, out: Path) -> dict[str, Any]:
    """Train alone on the scored rows of the whole run."""
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train"]}
    body["data"]["train_files"] = str(whole / "score" / "trajectories.parquet")
    return body


def test_preference_pairs_alone_are_enough(
    tiny: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    body = recipe(tiny, data, out) | {"stages": ["reward", "score", "train"]}
    body["data"]["train_files"] = str(data / "pairs.parquet")
    body["reward"] = {"batch_size": 16, "epochs": 2, "optim": {"lr": "1e-3"}}
    body["score"] = {"reward": "model"}
    assert rein("run", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    assert "rollout_correction: auto -> none, the behavior policy is unknown" in capsys.readouterr().out
    rows = {stage: manifest(out, stage)["rows"] for stage in body["stages"]}
    assert rows["reward"] == {"in": 96, "rejected": 0, "held_out": 48, "trained": 48}
    assert rows["score"] == {"in": 192, "rejected": 0, "scored": 192}
    assert rows["train"] == {"in": 192, "rejected": 0, "held_out": 96, "trained": 96}
    names = {name for line in metrics(out) for name in line}
    assert not any(name.startswith("rollout_corr/") for name in names)
    assert "kl/reference" not in names  # it cannot be estimated without behavior log-probs
    assert not same_weights(tiny, out / "train" / "last")


def test_lora_trains_every_model_and_exports_a_plain_folder(tiny: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    body = recipe(tiny, data, out)
    body["stages"] = ["sft", "reward", "rollout", "score", "train", "evaluate", "export"]
    body["model"] |= {"lora_rank": 4, "lora_alpha": 32}
    body["reward"] = {"files": str(data / "pairs.parquet"), "batch_size": 16, "optim": {"lr": "1e-2"}}
    body["score"] = {"reward": "model"}
    body["evaluate"]["reward"] = {"name": "exact", "options": {"marker": "#"}}
    for section in ("sft", "actor", "critic"):
        body[section]["optim"] = {"lr": "1e-2"}
    assert rein("run", write_recipe(tmp_path / "recipe.yaml", body)) == 0

    folders = {"sft/model": tiny, "train/last": out / "sft" / "model", "export/model": tiny}
    for name, start in folders.items():
        here, there = weights(out / name), weights(start)
        assert here.keys() == there.keys(), name
        changed = {weight for weight in here if not here[weight].equal(there[weight])}
        assert changed == {weight for weight in here if re.search(r"_proj\.weight$", weight)}, name
        assert not (out / name / "adapter_config.json").exists()
    probes = [line["probe/kl_reference"] for line in metrics(out) if "probe/kl_reference" in line]
    assert probes[0] == 0  # the reference is the fine-tuned start, not the bare base below the adapter
    assert probes[-1] > 0
    first = next(line for line in metrics(out) if "actor/kl_loss" in line)
    assert abs(first["actor/kl_loss"]) < 1e-9
    assert first["actor/pg_clipfrac"] == 0


def test_plain_transformers_gives_the_answers_that_evaluate_reported(whole: Path) -> None:
    answers = pq.read_table(whole / "evaluate" / "answers.parquet").to_pylist()
    assert len({tuple(row["after_ids"]) for row in answers}) > 1
    prompts = [row["prompt"] for row in answers]
    command = [sys.executable, "-W", "ignore", "-c", PLAIN, whole / "export" / "model", "10", *prompts]
    done = subprocess.run(command, capture_output=True, text=True, env=OFFLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [row["after_ids"] for row in answers]


def test_filtered_cloning_imitates_only_what_scored(whole: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    file = write_recipe(tmp_path / "recipe.yaml", stored(whole, data, out))
    words = ("algorithm.method=filtered_bc", "data.train_batch_size=24", "trainer.total_epochs=6")
    assert rein("train", file, *words) == 0
    rows = manifest(out, "train")["rows"]
    assert rows["in"] == 192 == rows["rejected"] + rows["held_out"] + rows["filtered"] + rows["trained"]
    good = [row["score"] == 1 for row in pq.read_table(whole / "score" / "trajectories.parquet").to_pylist()]
    assert 24 <= rows["trained"] < sum(good)
    assert not (out / "train" / "critic").exists()
    losses = [line["actor/pg_loss"] for line in metrics(out) if "actor/pg_loss" in line]
    third = len(losses) // 3
    assert sum(losses[-third:]) < sum(losses[:third]) - 0.1 * third


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_kl_in_the_reward_is_paid_and_controlled(kind: str, whole: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    file = write_recipe(tmp_path / "recipe.yaml", stored(whole, data, out))
    control = ("algorithm.kl_ctrl.target_kl=1e-6", "algorithm.kl_ctrl.horizon=96")
    words = ("algorithm.use_kl_in_reward=true", "actor.use_kl_loss=false", "algorithm.kl_ctrl.kl_coef=0.1")
    assert rein("train", file, *words, f"algorithm.kl_ctrl.type={kind}", *control) == 0
    lines = [line for line in metrics(out) if "actor/reward_kl_penalty" in line]
    coefs = [line["actor/reward_kl_penalty_coeff"] for line in lines]
    # adaptive: the KL is far above its target, so the error is cut off at 0.2 and half a horizon is served
    assert coefs == pytest.approx([0.1, 0.1] if kind == "fixed" else [0.1, 0.1 * (1 + 0.2 * 48 / 96)])
    assert lines[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6)
    assert abs(lines[1]["actor/reward_kl_penalty"]) > 1e-4
    assert not any("actor/kl_loss" in line for line in metrics(out))


def test_the_users_function_scores(
    whole: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e2e_user_rewards").mkdir()
    (tmp_path / "e2e_user_rewards" / "digits.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info, per_digit=1.0):\n"
        "    assert data_source == 'addition' and extra_info['split'] and ground_truth.isdigit()\n"
        "    return {'score': per_digit * sum(c.isdigit() for c in solution_str)}\n"
    )
    body = stored(whole, data, tmp_path / "run") | {"stages": ["score", "train"]}
    body["score"] = {"reward": {"name": "e2e_user_rewards.digits:score", "options": {"per_digit": 0.5}}}
    body["score"]["files"] = str(whole / "rollout" / "trajectories.parquet")
    body["evaluate"]["reward"] = {"name": "exact", "options": {"marker": "#"}}
    assert rein("run", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    rows = pq.read_table(tmp_path / "run" / "score" / "trajectories.parquet").to_pylist()
    assert [row["score"] for row in rows] == [sum(c.isdigit() for c in row["response"]) / 2 for row in rows]
    means = [line["critic/score/mean"] for line in metrics(tmp_path / "run") if "critic/score/mean" in line]
    assert all(mean > 0.5 for mean in means)


def gsm8k_row(index: int) -> dict[str, Any]:
    """A problem as verl's preprocessing of GSM8K writes it; the problem is our own."""
    apples, more = 2 + index % 40, 3 + index // 40
    question = f"Ann has {apples} apples and buys {more} more. How many apples does Ann have?"
    working = f"{apples}+{more}=<<{apples}+{more}={apples + more}>>{apples + more} apples"
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f'{question} Output the final answer after "####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(apples + more)},
        "extra_info": {
            "split": "train",
            "index": index,
            "question": question,
            "answer": f"{working}\n#### {apples + more}",
        },
    }


def test_verls_gsm8k_layout_trains_as_it_is(tmp_path: Path) -> None:
    model = make_tiny(
        tmp_path / "model", seed=0, hidden=32, layers=2, characters=string.printable.replace("\n", "") + "\n"
    )
    file = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([gsm8k_row(i) for i in range(80)]), file)
    out = tmp_path / "run"
    body = recipe(model, tmp_path, out) | {"stages": ["sft", "rollout", "score", "train"]}
    body["data"] = {"train_files": str(file), "max_prompt_length": 160, "max_response_length": 60}
    body["data"] |= {"train_batch_size": 40}
    body["sft"] = {"response_key": "extra_info.answer", "batch_size": 40}
    body["rollout"] = {"n": 2, "max_new_tokens": 6}
    body["score"] = {"reward": [{"name": "gsm8k"}, {"name": "length", "weight": 0.1}]}
    assert rein("run", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    assert manifest(out, "sft")["rows"] == {"in": 80, "rejected": 0, "trained": 80}
    assert manifest(out, "train")["rows"] == {"in": 160, "rejected": 0, "held_out": 80, "trained": 80}
    row = pq.read_table(out / "score" / "trajectories.parquet").to_pylist()[0]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"]["ground_truth"] == "5"
    assert row["extra_info"]["answer"].endswith("#### 5")
    assert all(math.isfinite(line.get("actor/pg_loss", 0)) for line in metrics(out))
