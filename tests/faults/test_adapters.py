"""B30 and B50 by the command line: adapters learn under checkpointing; the reference is the start policy."""

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rein import cli
from rein.data import addition
from rein.tracking.jsonl import read_metrics

LORA = ("model.lora_rank=4", "model.lora_alpha=8")
SCORE = 'score.reward={name: format, options: {pattern: "[0-4]{2}", match: search}}'


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addition")
    addition.write(folder, 0, demonstrations=1, prompts=64, dev=4, test=1, pairs=1)
    return folder / "prompts.parquet"


def trained(model: str, prompts: Path, out: Path, *words: str) -> list[dict[str, Any]]:
    """Rollouts of a model, scored, and one batch of PPO on them; the metrics."""
    own = f"""
        out={out} threads=1 model.path={model} stages=[rollout,score,train]
        rollout.files={prompts} rollout.n=2
        data.val_files={prompts.parent}/dev.parquet data.max_response_length=8 data.train_batch_size=64
        actor.ppo_mini_batch_size=64 actor.ppo_epochs=1 trainer.critic_warmup=1
        actor.optim.lr=1e-2 critic.optim.lr=1e-2
    """.split()
    assert cli.main(["run", *own, SCORE, *words]) == 0
    return read_metrics(out / "train" / "metrics.jsonl")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_one_update_moves_every_adapter_under_gradient_checkpointing(
    tiny_lm: str, prompts: Path, tmp_path: Path
) -> None:
    lines = trained(tiny_lm, prompts, tmp_path / "with", *LORA, "model.enable_gradient_checkpointing=true")
    norms = [line[name] for line in lines for name in ("actor/grad_norm", "critic/grad_norm") if name in line]
    assert all(norm > 0 for norm in norms)
    start, moved = weights(Path(tiny_lm)), weights(tmp_path / "with" / "train" / "last")
    for name, tensor in moved.items():
        # B starts at zero: the fused weight moves exactly where B did.
        assert tensor.equal(start[name]) != bool(re.search(r"_proj\.weight$", name)), name
    trained(tiny_lm, prompts, tmp_path / "without", *LORA)
    for model in ("last", "critic"):
        other = weights(tmp_path / "without" / "train" / model)
        for name, tensor in weights(tmp_path / "with" / "train" / model).items():
            assert torch.allclose(tensor, other[name], atol=1e-6), name


def adapted(base: str, target: Path) -> dict[str, torch.Tensor]:
    """A peft folder that is far from its base; the weights of base + adapter."""
    model = AutoModelForCausalLM.from_pretrained(base)
    adapter = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    adapter.save_pretrained(target)
    AutoTokenizer.from_pretrained(base).save_pretrained(target)
    merged: dict[str, torch.Tensor] = adapter.merge_and_unload().state_dict()
    return merged


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own use of it
def test_going_on_from_an_adapter_the_reference_is_the_adapted_policy(
    tiny_lm: str, prompts: Path, tmp_path: Path
) -> None:
    merged = adapted(tiny_lm, tmp_path / "adapter")
    out = tmp_path / "run"
    lines = trained(str(tmp_path / "adapter"), prompts, out, *LORA)
    probes = [line["probe/kl_reference"] for line in lines if "probe/kl_reference" in line]
    assert probes[0] == 0
    assert probes[-1] > 0
    first = next(line for line in lines if "training/log_prob_diff_max" in line)
    assert first["training/log_prob_diff_max"] < 1e-3  # the adapted policy wrote the rows
    assert next(line for line in lines if "actor/kl_loss" in line)["actor/kl_loss"] == pytest.approx(
        0, abs=1e-9
    )

    facts = json.loads((out / "rollout" / "manifest.json").read_text())["facts"]
    assert facts["log_prob_diff_max"] < 1e-3
    assert pq.read_table(out / "rollout" / "trajectories.parquet").num_rows == 128
    export = [f"out={out}", f"model.path={tiny_lm}", f"export.path={tmp_path}/adapter"]
    assert cli.main(["export", *export]) == 0
    for name, tensor in weights(out / "export" / "model").items():
        assert torch.allclose(tensor, merged[name], atol=1e-6), name
