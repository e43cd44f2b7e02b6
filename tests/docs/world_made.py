"""A small real world for the pages' commands: a model that answers sums, its stored answers in many layouts.

The model is taught by `rein sft` for a few seconds; answers, log-probs and scores are its own.
"""

import json
import string
from pathlib import Path
from typing import Any

from rein.cli import main
from rein.data import schemas as s
from rein.data.parquet import read_rows, write_rows
from rein.models.tiny import make_tiny

ANSWERS, PROMPTS, HELD = 8, 210, 60
Row = dict[str, Any]


def problems(first: int, count: int) -> list[tuple[int, int]]:
    return [(i // 10, i % 10) for i in range(first, first + count)]


def prompt_row(a: int, b: int) -> Row:
    truth = {"style": "rule", s.GROUND_TRUTH: str(a + b)}
    return {s.PROMPT: f"{a}+{b}=", s.DATA_SOURCE: "sums", s.REWARD_MODEL: truth}


def make(folder: Path) -> Path:
    """models/my-sft-model, scored.parquet (with log-probs), and the same rows as other tools keep them."""
    base = make_tiny(folder / "base", seed=0, hidden=64, layers=2, characters=string.printable.strip())
    shown = [{s.PROMPT: f"{a}+{b}=", s.RESPONSE: f"#### {a + b}"} for a, b in problems(0, 330)]
    write_rows(folder / "demonstrations.parquet", shown, s.SFT)
    asked = [prompt_row(a, b) for a, b in problems(0, PROMPTS)]
    write_rows(folder / "prompts.parquet", asked, s.PROMPTS)
    for name, first in (("dev", PROMPTS), ("test", PROMPTS + HELD)):
        rows = [prompt_row(a, b) for a, b in problems(first, HELD)]
        write_rows(folder / f"{name}.parquet", rows, s.PROMPTS)
    recipe = {
        "out": str(folder / "made"),
        "stages": ["sft", "rollout", "score"],
        "threads": 1,
        "model": {"path": str(base)},
        "data": {
            "train_files": str(folder / "prompts.parquet"),
            "max_prompt_length": 16,
            "max_response_length": 16,
        },
        "sft": {
            "files": str(folder / "demonstrations.parquet"),
            "batch_size": 64,
            "total_steps": 150,
            "optim": {"lr": 3e-3, "lr_warmup_steps": 10},
        },
        "rollout": {"n": ANSWERS, "batch_size": 256},
        "score": {"reward": "gsm8k"},
    }
    (folder / "made.json").write_text(json.dumps(recipe))
    assert main(["run", str(folder / "made.json")]) == 0
    (folder / "models").mkdir()
    (folder / "made" / "sft" / "model").rename(folder / "models" / "my-sft-model")
    scored = [row for _, row in read_rows(folder / "made" / "score" / "trajectories.parquet")]
    write_rows(folder / "scored.parquet", scored, s.TRAJECTORIES)
    others(folder, scored)
    return folder


def others(folder: Path, rows: list[Row]) -> None:
    """verl's dumps, an OpenAI batch, preference pairs."""
    dumped = [
        {"input": text(row[s.PROMPT]), "output": row[s.RESPONSE], "gts": row[s.REWARD_MODEL][s.GROUND_TRUTH]}
        | {"score": row[s.SCORE], "step": 1}
        for row in rows
    ]
    (folder / "rollouts").mkdir()
    lines(folder / "rollouts" / "1.jsonl", dumped)
    lines(folder / "dump.jsonl", dumped)
    messages = [{"role": "user", "content": "1+1="}]
    lines(folder / "requests.jsonl", [request(f"r{i}", messages) for i in range(4)])
    lines(folder / "outputs.jsonl", [reply(f"r{i}") for i in range(4)])
    pairs = [
        {s.PROMPT: f"{a}+{b}=", s.CHOSEN: f"#### {a + b}", s.REJECTED: f"#### {a + b + 1}"}
        for a, b in problems(0, 330)
    ]
    write_rows(folder / "pairs.parquet", pairs, s.PREFERENCES)


def text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[0]["content"]


def request(name: str, messages: list[Row]) -> Row:
    body = {"model": "m", "messages": messages, "temperature": 1.0}
    return {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}


def reply(name: str) -> Row:
    choice = {"index": 0, "message": {"role": "assistant", "content": "#### 2"}, "finish_reason": "stop"}
    body = {"id": name, "object": "chat.completion", "model": "m", "choices": [choice]}
    return {"id": name, "custom_id": name, "response": {"status_code": 200, "body": body}, "error": None}


def lines(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
