"""Files in other tools' layouts are converted and train: two updates each on a tiny model."""

import json
import os
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from e2e_run import ROOT, manifest, metrics, rein, write_recipe
from transformers import AutoTokenizer

from rein.data.parquet import read_rows
from rein.models.tiny import make_tiny

SOLUTIONS = (
    Path(os.environ.get("REIN_DATA", ROOT.parent / "shared" / "data"))
    / "gsm8k"
    / "example_model_solutions.jsonl"
)
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
N = 80
Rows = list[dict[str, Any]]
Trained = Callable[..., Path]


def question(i: int) -> str:
    return f"{i}+{i % 7}="


def answer(i: int, wrong: int = 0) -> str:
    return str(i + i % 7 + wrong)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert") / "model"
    characters = string.printable.replace("\n", "") + "\n’–…£°é"
    make_tiny(folder, seed=0, hidden=32, layers=1, characters=characters)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 512}))
    return folder


@pytest.fixture(scope="module")
def chat_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template, which several turns need."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    make_tiny(folder, seed=0, hidden=32, layers=1, characters=string.printable.replace("\n", "") + "\n")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(str(folder))
    return folder


@pytest.fixture
def train(tmp_path: Path) -> Trained:
    """Write the rows, convert them, run stages on what came out; the run's folder."""

    def go(rows: Rows, start: Path, form: str, *words: str, **body: Any) -> Path:
        source, made, out = tmp_path / "in.jsonl", tmp_path / "made.parquet", tmp_path / "run"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        assert rein("convert", source, made, "--from", form, "--force") == 0
        stages = body.pop("stages", ["train"])
        given = {
            "out": str(out),
            "threads": 1,
            "stages": stages,
            "model": {"path": str(start)},
            "data": {"train_files": str(made), "train_batch_size": 16, "max_response_length": 64},
            "actor": {"ppo_mini_batch_size": 16, "ppo_epochs": 1, "optim": {"lr": "1e-3"}},
            "trainer": {"critic_warmup": 0, "total_training_steps": 2, "val_prompts": 2},
        }
        assert rein("run", write_recipe(tmp_path / "recipe.yaml", given | body), *words) == 0
        return out

    return go


def updates(out: Path) -> int:
    return sum("actor/pg_loss" in line for line in metrics(out))


@pytest.fixture(scope="module")
def sampled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """Answers of the tiny model itself with their ids and log-probs."""
    folder = tmp_path_factory.mktemp("sampled")
    (folder / "p.jsonl").write_text("".join(json.dumps({"prompt": question(i)}) + "\n" for i in range(N)))
    body = {
        "out": str(folder / "run"),
        "threads": 1,
        "model": {"path": str(model)},
        "rollout": {"files": str(folder / "p.jsonl"), "n": 1, "max_new_tokens": 5},
    }
    assert rein("rollout", write_recipe(folder / "recipe.yaml", body)) == 0
    return [row for _, row in read_rows(folder / "run" / "rollout" / "trajectories.parquet")]


def of_the_behavior(out: Path) -> float:
    """How far stored log-probs are from the actor that wrote them, before it has moved."""
    line = next(line for line in metrics(out) if "training/log_prob_diff_max" in line)
    return float(line["training/log_prob_diff_max"])


def test_openai_completions_with_log_probs(sampled: Rows, model: Path, train: Trained) -> None:
    rows = [
        {
            "request": {"model": "tiny", "prompt": row["prompt"], "temperature": 1.0, "logprobs": 1},
            "response": {
                "object": "text_completion",
                "model": "tiny",
                "choices": [
                    {
                        "index": 0,
                        "text": row["response"],
                        "finish_reason": row["finish_reason"],
                        "logprobs": {
                            "tokens": [f"token_id:{i}" for i in row["response_ids"]],
                            "token_logprobs": row["behavior_log_probs"],
                        },
                    }
                ],
            },
            "score": i % 2,
        }
        for i, row in enumerate(sampled)
    ]
    out = train(rows, model, "openai")
    assert updates(out) == 2
    assert of_the_behavior(out) < 1e-3


def test_vllm_outputs(sampled: Rows, model: Path, train: Trained) -> None:
    rows = [
        {
            "request_id": str(i),
            "prompt": row["prompt"],
            "prompt_token_ids": row["prompt_ids"],
            "outputs": [
                {
                    "index": 0,
                    "text": row["response"],
                    "token_ids": row["response_ids"],
                    "cumulative_logprob": sum(row["behavior_log_probs"]),
                    "logprobs": [
                        {"0": {"logprob": -9.0, "rank": 40}, str(token): {"logprob": number, "rank": 1}}
                        for token, number in zip(row["response_ids"], row["behavior_log_probs"], strict=True)
                    ],
                    "finish_reason": row["finish_reason"],
                }
            ],
            "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1},
            "score": i % 2,
        }
        for i, row in enumerate(sampled)
    ]
    out = train(rows, model, "auto", "algorithm.method=topr")
    assert updates(out) == 2
    assert of_the_behavior(out) < 1e-3


def test_verls_gsm8k_rows(model: Path, train: Trained) -> None:
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": question(i)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer(i)},
            "extra_info": {"index": i, "answer": f"#### {answer(i)}", "question": question(i)},
        }
        for i in range(N)
    ]
    reward = [{"name": "gsm8k"}, {"name": "length", "weight": 0.1}]
    out = train(
        rows, model, "verl",
        stages=["rollout", "score", "train"], rollout={"n": 1, "max_new_tokens": 4}, score={"reward": reward},
    )  # fmt: skip
    assert updates(out) == 2


def test_verls_rollout_dumps(model: Path, train: Trained) -> None:
    rows = [
        {"input": question(i), "output": answer(i, i % 2), "gts": answer(i), "score": 1.0 - i % 2, "step": 1}
        for i in range(N)
    ]
    out = train(rows, model, "auto", "algorithm.method=awr")
    assert updates(out) == 2


@pytest.mark.parametrize("inside", [False, True])
def test_trl_preferences(inside: bool, model: Path, train: Trained) -> None:
    def side(i: int, wrong: int) -> Any:
        turn = {"role": "assistant", "content": answer(i, wrong)}
        return [{"role": "user", "content": question(i)}, turn] if inside else answer(i, wrong)

    rows = [{"chosen": side(i, 0), "rejected": side(i, 1)} for i in range(N)]
    rows = rows if inside else [row | {"prompt": question(i)} for i, row in enumerate(rows)]
    assert updates(train(rows, model, "trl", "algorithm.method=dpo")) == 2


def test_openrlhf_rows(model: Path, train: Trained) -> None:
    rows = [
        {
            "context_messages": [{"role": "user", "content": question(i)}],
            "chosen": [{"role": "assistant", "content": answer(i)}],
            "rejected": [{"role": "assistant", "content": answer(i, 1)}],
        }
        for i in range(N)
    ]
    out = train(rows, model, "openrlhf", stages=["reward"], reward={"batch_size": 40, "epochs": 1})
    assert manifest(out, "reward")["rows"]["in"] == N


def test_llamafactory_alpaca(model: Path, train: Trained) -> None:
    rows = [{"instruction": "Add.", "input": question(i), "output": answer(i)} for i in range(N)]
    out = train(rows, model, "llamafactory", stages=["sft"], sft={"batch_size": 16, "total_steps": 2})
    assert manifest(out, "sft")["rows"] == {"in": N, "rejected": 0, "trained": N}


def test_llamafactory_sharegpt_with_tools(chat_model: Path, train: Trained) -> None:
    rows = [
        {
            "conversations": [
                {"from": "human", "value": question(i)},
                {"from": "function_call", "value": json.dumps({"name": "add", "arguments": {"a": i}})},
                {"from": "observation", "value": answer(i)},
                {"from": "gpt", "value": f"It is {answer(i)}."},
            ],
            "system": "Add.",
            "tools": "[]",
        }
        for i in range(N)
    ]
    out = train(rows, chat_model, "llamafactory", stages=["sft"], sft={"batch_size": 16, "total_steps": 2})
    assert manifest(out, "sft")["rows"] == {"in": N, "rejected": 0, "trained": N}


@pytest.fixture(scope="module")
def solutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with GSM8K's stored solutions of its first questions, as rows and as pairs."""
    if not SOLUTIONS.exists():
        pytest.skip(f"{SOLUTIONS} is not there; REIN_DATA names the folder that holds gsm8k/")
    folder = tmp_path_factory.mktemp("solutions")
    for kind in ("trajectories", "preferences"):
        words = ("--from", "solutions", "--to", kind, "--limit", "90")
        assert rein("convert", SOLUTIONS, folder / f"{kind}.parquet", *words) == 0
    return folder


def of_solutions(kind: str, solutions: Path, model: Path, out: Path) -> dict[str, Any]:
    """A recipe for what of them is short enough for the tiny model."""
    return {
        "out": str(out),
        "threads": 1,
        "model": {"path": str(model)},
        "data": {
            "train_files": str(solutions / f"{kind}.parquet"),
            "train_batch_size": 16,
            "max_prompt_length": 250,
            "max_response_length": 250,
        },
        "actor": {"ppo_mini_batch_size": 16, "ppo_epochs": 1, "optim": {"lr": "1e-3"}},
        "trainer": {
            "critic_warmup": 0,
            "total_training_steps": 2,
            "val_before_train": False,
            "test_freq": -1,
        },
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["awr", "filtered_bc"])
def test_stored_solutions_train_without_log_probs(
    method: str, solutions: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = of_solutions("trajectories", solutions, model, tmp_path / "run")
    assert rein("train", write_recipe(tmp_path / "r.yaml", body), f"algorithm.method={method}") == 0
    assert updates(tmp_path / "run") == 2
    assert manifest(tmp_path / "run", "train")["rows"]["in"] == 360
    assert "behavior_log_probs are not stored: behavior unknown" in capsys.readouterr().out


@pytest.mark.slow
def test_stored_solutions_make_pairs_for_a_reward_model(solutions: Path, model: Path, tmp_path: Path) -> None:
    body = of_solutions("preferences", solutions, model, tmp_path / "run")
    body["reward"] = {"batch_size": 5, "epochs": 1}
    assert rein("reward", write_recipe(tmp_path / "r.yaml", body)) == 0
    rows = manifest(tmp_path / "run", "reward")["rows"]
    assert rows["trained"] > 0
    assert rows["in"] == rows["rejected"] + rows["held_out"] + rows["trained"]
