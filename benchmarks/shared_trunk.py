"""Memory of actor, critic and reference with LoRA: on one set of weights, and apart.

    python benchmarks/shared_trunk.py --model runs/smollm2

Each set-up is a process of its own on one thread, in `exact` and in `fast`: the actor alone, all three with
`critic.model.share_trunk`, all three without. What is measured is resident memory above what the process
holds before the model is loaded: after loading, and at the peak of an update of both roles, optimizer step
and exact KL to the reference included, Adam's moments already there. The claim: actor, critic and reference
need no more than 1.3 times one model's weights and what one model's update takes on top.

The weights are first stored in bfloat16, as most are published, and trained in float32. Stored in float32
they would be mapped from their file: frozen ones of two models are then the same pages, counted twice.
Large tensors are given back to the system when they are freed, so that resident is what is in use. In
training freed memory is kept; the holes in it come on top, 1 GiB and more here, other ones in each run.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import numpy as np
import torch
from results_io import table, write
from transformers import AutoModelForCausalLM

from rein.config.recipe import Recipe
from rein.experience import padded
from rein.learner import Learner
from rein.models.actor import load_actor
from rein.models.critic import critic_on, load_critic
from rein.models.reference import Reference
from rein.models.tiny import make_tiny
from rein.runtime.single import SingleMesh
from rein.types import Experience, Trajectory, Update

SETUPS = {"one": "the actor alone", "shared": "actor, critic, reference: shared", "apart": "the same, apart"}
PRECISIONS = ("exact", "fast")
PROMPT, RESPONSE = 64, 192  # tokens of a row
ALLOWED = 1.3
MIB = 2**20


def of_status(name: str) -> int:
    """Bytes: VmRSS now, VmHWM at the peak since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def resident() -> int:
    """Bytes in use now; the peak begins anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return of_status("VmRSS")


def experience_of(rows: int, vocabulary: int) -> Experience:
    draw = np.random.default_rng(0)
    mask = np.ones(RESPONSE, dtype=np.bool_)
    made = [
        Trajectory(
            f"row {i}", "", draw.integers(0, vocabulary, PROMPT), draw.integers(0, vocabulary, RESPONSE), mask
        )
        for i in range(rows)
    ]
    numbers = torch.randn(rows, RESPONSE, generator=torch.Generator().manual_seed(0))
    return Experience(
        rows=made,
        response_mask=padded([row.response_mask for row in made], torch.bool),
        temperature=torch.ones(rows, dtype=torch.float64),
        old_log_probs=numbers - 10,
        ref_log_probs=numbers - 10,
        advantages=numbers,
        values=numbers,
        returns=numbers,
    )


def recipe_of(args: argparse.Namespace, model: str, precision: str) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"path": model, "precision": precision, "lora_rank": args.rank},
            "actor": {
                "ppo_mini_batch_size": args.rows,
                "ppo_max_token_len_per_gpu": args.budget,
                "kl_loss_type": "full",
            },
        }
    )


def learner_of(recipe: Recipe, setup: str) -> Learner:
    loading = {"precision": recipe.model.precision}
    lora: dict[str, Any] = {"lora_rank": recipe.model.lora_rank}
    actor = load_actor(str(recipe.model.path), seed=1, **loading, **lora)
    critic = None
    if setup == "shared":
        critic = critic_on(actor, seed=2, **lora)
    elif setup == "apart":
        critic = load_critic(str(recipe.model.path), seed=2, **loading, **lora)
    return Learner(
        recipe, actor, critic, SingleMesh(),
        kl_coef_in_loss=0.05, kl_coef_in_reward=0.0, actor_steps=9, critic_steps=9,
        reference=Reference(actor),
    )  # fmt: skip


def update(learner: Learner, experience: Experience) -> None:
    for role in ("critic", "actor"):
        if role in learner.optimizers:
            learner.backward(Update(role, tuple(range(len(experience.rows))), 0), experience)
            learner.apply(role)


def measured(args: argparse.Namespace, setup: str, precision: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:  # what libraries load on first use is no model's
        tiny = make_tiny(Path(folder) / "tiny", seed=0)
        update(learner_of(recipe_of(args, str(tiny), precision), setup), experience_of(1, 18))
    empty = resident()
    learner = learner_of(recipe_of(args, args.model, precision), setup)
    loaded = resident() - empty
    models = [model.model for model in (learner.actor, learner.critic) if model is not None]
    weights = sum(p.nbytes for p in models[0].parameters() if not p.requires_grad)
    parameters = {id(p): p.nbytes for model in models for p in model.parameters()}
    update(learner, experience_of(1, models[0].config.vocab_size))  # Adam's moments
    before = resident() - empty
    update(learner, experience_of(args.rows, models[0].config.vocab_size))
    return {
        "setup": setup,
        "precision": precision,
        "weights": weights,
        "parameters": sum(parameters.values()),
        "loaded": loaded,
        "before_update": before,
        "peak": of_status("VmHWM") - empty,
    }


def stored_in_half(model: str, folder: str) -> str:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def in_a_process(args: argparse.Namespace, setup: str, precision: str) -> dict[str, Any]:
    words = [sys.executable, __file__, "--model", args.model, "--only", setup, precision]
    words += [f"--{name}={getattr(args, name)}" for name in ("rank", "rows", "budget")]
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16)}
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | alone)
    if done.returncode:
        raise SystemExit(f"{setup}, {precision}: {done.stderr.strip()[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(json.dumps(found), flush=True)
    return found


def report(rows: list[dict[str, Any]]) -> str:
    shown = []
    for row in rows:
        sizes = (round(row[key] / MIB) for key in ("parameters", "loaded", "before_update", "peak"))
        times = (f"{row[key] / row['weights']:.2f}" for key in ("parameters", "loaded", "before_update"))
        shown.append([SETUPS[row["setup"]], row["precision"], *sizes, *times])
    head = [
        "set-up",
        "precision",
        "parameters, MiB",
        "resident, loaded",
        "with Adam's moments",
        "peak of an update",
    ]
    head += ["parameters / weights", "loaded / weights", "with moments / weights"]
    one, three = (
        next(row for row in rows if (row["setup"], row["precision"]) == (setup, "exact"))
        for setup in ("one", "shared")
    )
    weights, activations = ALLOWED * three["weights"], one["peak"] - one["before_update"]
    limits = {
        "What stays": (three["before_update"], weights),
        "The peak": (three["peak"], weights + activations),
    }
    said = [
        f"{name} of the three is {found / MIB:.0f} MiB, allowed {limit / MIB:.0f}: "
        f"{'held' if found <= limit else 'broken'}."
        for name, (found, limit) in limits.items()
    ]
    allowed = (
        f"Allowed, `exact`: {ALLOWED} x {three['weights'] / MIB:.0f} MiB of weights; at the peak also the "
        f"{activations / MIB:.0f} MiB that the actor's update alone takes."
    )
    return "\n\n".join([table(head, shown), allowed, " ".join(said)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=int, default=8, help=f"of {PROMPT} + {RESPONSE} tokens")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a micro-batch")
    parser.add_argument("--only", nargs=2, metavar=("SETUP", "PRECISION"), help="one, in this process")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.only:
        print(json.dumps(measured(args, *args.only)), flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        args.model = stored_in_half(args.model, folder)
        rows = [in_a_process(args, setup, precision) for precision in PRECISIONS for setup in SETUPS]
    text = report(rows)
    settings = {"rank": args.rank, "rows": args.rows, "budget": args.budget}
    write("shared_trunk", settings, rows, text)
    print(text)


if __name__ == "__main__":
    main()
