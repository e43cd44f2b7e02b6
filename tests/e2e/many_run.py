"""What runs on many processes share with those on one: a small recipe, and how far two runs are apart."""

import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
from e2e_run import metrics, recipe, weights

from rein.tracking.jsonl import untimed

FITTED = "pareto_k"  # of a tail: found by a search that magnifies rounding
Lines = list[dict[str, Any]]


def train_recipe(whole: Path, data: Path, out: Path, **model: Any) -> dict[str, Any]:
    """Two batches of critic and actor updates, in float64, from what earlier stages made."""
    body = recipe(whole / "sft" / "model", data, out) | {"stages": ["train"]}
    body["model"] |= {"dtype": "float64", **model}
    body["data"] |= {"train_files": str(whole / "score" / "trajectories.parquet"), "train_batch_size": 96}
    body["trainer"] = {"critic_warmup": 2, "total_epochs": 1}
    body["actor"] |= {"ppo_max_token_len_per_gpu": 256}
    return body


def far(one: Lines, other: Lines) -> float:
    """The largest difference between two runs' numbers, relative to the larger one or to 1e-6."""
    worst, at = 0.0, ""
    for a, b in zip(untimed(one), untimed(other), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            if isinstance(value, float) and not name.startswith("perf/") and not name.endswith(FITTED):
                apart = abs(value - b[name]) / max(abs(value), abs(b[name]), 1e-6)
                worst, at = max((worst, at), (apart, f"{name} of {a['number']}"))
    print(f"apart: {worst:.2g}, {at}")
    return worst


def weights_apart(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def losses(out: Path) -> Lines:
    """Losses and gradient norms alone: small differences between large numbers are float32's own."""
    kept = ("pg_loss", "vf_loss", "grad_norm", "number")
    return [{name: line[name] for name in line if name.endswith(kept)} for line in metrics(out)]


def ranks_of(leader: int) -> list[int]:
    """The other processes of a run."""
    found = subprocess.run(["pgrep", "-P", str(leader)], capture_output=True, text=True, check=False)
    return [int(number) for number in found.stdout.split()]


def gone(numbers: list[int], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{number}").exists() for number in numbers):
            return True
        time.sleep(0.05)
    return False


def family(leader: int) -> list[int]:
    """All processes that a run has begun, and what they have begun."""
    return [process.pid for process in psutil.Process(leader).children(recursive=True)]


def by_role(out: Path) -> dict[str, list[float]]:
    """Losses and gradient norms, each in its own order: roles that alternate come in another one together."""
    found: dict[str, list[float]] = {}
    for line in losses(out):
        for name, value in line.items():
            if name != "number":
                found.setdefault(name, []).append(value)
    return found


def apart_by_role(one: Path, other: Path) -> float:
    a, b = by_role(one), by_role(other)
    assert {name: len(values) for name, values in a.items()} == {name: len(v) for name, v in b.items()}
    return max(
        abs(x - y) / max(abs(x), abs(y), 1e-6) for name in a for x, y in zip(a[name], b[name], strict=True)
    )


def ended(process: "subprocess.Popen[str]", code: int) -> tuple[str, str]:
    """What a command says when it ends with `code`; it must leave no process that it has begun."""
    known: set[int] = set()
    while process.poll() is None:
        known |= set(family(process.pid)) if psutil.pid_exists(process.pid) else set()
        time.sleep(0.2)
    out, err = process.communicate()
    assert process.returncode == code, err
    assert gone(sorted(known))
    return out, err
