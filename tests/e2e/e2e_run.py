"""A small recipe of everything, and what to read of the run it leaves."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from rein import cli
from rein.tracking.jsonl import read_metrics

ROOT = Path(__file__).parents[2]
STAGES = ["sft", "rollout", "score", "train", "evaluate", "export", "report"]
Refuse = Callable[[int, str, dict[str, Any]], str]  # exit code, verb, recipe -> the line on stderr
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def recipe(tiny: Path, data: Path, out: Path) -> dict[str, Any]:
    """Every stage, a few steps each, on random weights: answers of up to 10 characters."""
    return {
        "out": str(out),
        "threads": 1,
        "stages": STAGES,
        "model": {"path": str(tiny)},
        "data": {
            "val_files": str(data / "dev.parquet"),
            "max_prompt_length": 16,
            "max_response_length": 48,
            "train_batch_size": 48,
        },
        "sft": {
            "files": str(data / "demonstrations.parquet"),
            "batch_size": 16,
            "total_steps": 3,
            "optim": {"lr": "1e-3"},
        },
        "rollout": {"files": str(data / "prompts.parquet"), "n": 2, "max_new_tokens": 10},
        "score": {"reward": {"name": "format", "options": {"pattern": "[0-4]{2}", "match": "search"}}},
        "actor": {"ppo_mini_batch_size": 24, "ppo_epochs": 2, "optim": {"lr": "1e-3"}},
        "critic": {"optim": {"lr": "1e-3"}},
        "trainer": {"critic_warmup": 2},
        "evaluate": {"files": str(data / "test.parquet"), "pass_k": 2},
        "gate": {"enable": False},  # two updates make nothing better
    }


def write_recipe(path: Path, body: dict[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
    return str(path)


def rein(*words: object) -> int:
    """One command in this process."""
    return cli.main([str(word) for word in words])


def rein_apart(*words: object, **environment: str) -> "subprocess.Popen[str]":
    """One command as its own process, as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rein", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | OFFLINE | environment,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    """Bit for bit."""
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def metrics(out: Path, stage: str = "train") -> list[dict[str, Any]]:
    return read_metrics(out / stage / "metrics.jsonl")


def manifest(out: Path, stage: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((out / stage / "manifest.json").read_text(encoding="utf-8"))
    return body


def drafts(out: Path) -> list[str]:
    """What a stage writes beside its result while it works: nothing of it may be left."""
    return sorted(str(p.relative_to(out)) for p in out.rglob(".*")) if out.exists() else []
