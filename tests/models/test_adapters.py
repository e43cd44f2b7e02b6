"""B49: adapters on a tied or untied model, fused and reloaded, say what base and adapters say unfused."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rein.config.load import load
from rein.errors import CheckpointError, ConfigError
from rein.models.actor import load_actor
from rein.models.critic import load_critic
from rein.models.save import cast_folder
from rein.models.tiny import make_tiny
from rein.stages import export, pipeline
from rein.stages.export_check import logits
from rein.tracking.console import Console

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, of ties and of new rows: what comes out is tested
ATTENTION = ["q_proj", "v_proj"]
TARGETS: dict[str, Any] = {
    "all-linear": {"target_modules": "all-linear"},
    "attention": {"target_modules": ATTENTION},
    "rank-stabilised": {"target_modules": ATTENTION, "use_rslora": True, "r": 4, "lora_alpha": 32},
    "head": {"target_modules": [*ATTENTION, "lm_head"]},
    "embeddings": {"target_modules": [*ATTENTION, "embed_tokens"]},
    "whole head": {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
    "new tokens": {"target_modules": ATTENTION, "new_tokens": ["<a>", "<b>"]},
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def base(request: pytest.FixtureRequest, tiny_lm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param:
        return tiny_lm
    folder = tmp_path_factory.mktemp("untied") / "lm"
    shutil.copytree(tiny_lm, folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    shape = tensors["model.embed_tokens.weight"].shape
    tensors["lm_head.weight"] = torch.randn(shape, generator=generator) * 0.02
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return str(folder)


def adapted(base: str, target: Path, *, new_tokens: list[str] | None = None, **options: Any) -> torch.Tensor:
    """Write a folder of adapters that are far from zero; what base and adapters say, not fused."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    if new_tokens:
        tokenizer.add_tokens(new_tokens)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    given: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **options}
    adapter = get_peft_model(model, LoraConfig(**given))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in adapter.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    adapter.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return logits(adapter.eval())


def exported(source: Path, base: str, out: Path, *words: str) -> dict[str, Any]:
    recipe = load(None, [f"out={out}", f"model.path={base}", f"export.path={source}", *words])[0]
    return export.run(recipe, Console(quiet=True))


@pytest.mark.parametrize("which", TARGETS)
def test_the_fused_folder_says_what_base_and_adapters_say(which: str, base: str, tmp_path: Path) -> None:
    unfused = adapted(base, tmp_path / "adapter", **TARGETS[which])
    facts = exported(tmp_path / "adapter", base, tmp_path / "run")
    assert facts["fused_difference"] <= 1e-4
    folder = tmp_path / "run" / "export" / "model"
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.allclose(logits(plain.eval()), unfused, atol=1e-5)
    if which != "new tokens":  # far from its base
        assert (unfused - logits(AutoModelForCausalLM.from_pretrained(base).eval())).abs().max() > 1e-3

    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    parted = which in ("head", "embeddings", "whole head")
    tied = json.loads((Path(base) / "config.json").read_text())["tie_word_embeddings"] and not parted
    assert config["tie_word_embeddings"] == tied == ("lm_head.weight" not in tensors)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert plain.get_input_embeddings().num_embeddings == len(tokenizer) == config["vocab_size"]
    if which == "new tokens":
        assert tokenizer("<b>", add_special_tokens=False)["input_ids"] == [len(tokenizer) - 1]


def test_fusing_what_was_fused_changes_nothing(base: str, tmp_path: Path) -> None:
    adapted(base, tmp_path / "adapter", target_modules="all-linear")
    exported(tmp_path / "adapter", base, tmp_path / "one")
    once = tmp_path / "one" / "export" / "model"
    exported(once, base, tmp_path / "two")
    twice = load_file(tmp_path / "two" / "export" / "model" / "model.safetensors")
    for name, tensor in load_file(once / "model.safetensors").items():
        assert torch.equal(tensor, twice[name])


@pytest.mark.parametrize("asked", [None, "float32", "float16"])
def test_a_half_base_is_fused_in_float32_and_keeps_its_precision(
    asked: str | None, base: str, tmp_path: Path
) -> None:
    half = tmp_path / "half"
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(base).save_pretrained(half)
    wide = AutoModelForCausalLM.from_pretrained(half, dtype=torch.float32)
    wide.save_pretrained(tmp_path / "wide")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "wide")
    adapted(str(tmp_path / "wide"), tmp_path / "adapter", target_modules="all-linear")
    config = tmp_path / "adapter" / "adapter_config.json"
    for name, folder in (("wide", tmp_path / "wide"), ("half", half)):
        config.write_text(
            json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(folder)})
        )
        words = () if asked is None else (f"export.dtype={asked}",)
        facts = exported(tmp_path / "adapter", base, tmp_path / name, *(words if name == "half" else ()))
    assert facts["dtype"] == (asked or "bfloat16")
    dtype = getattr(torch, facts["dtype"])
    exact = load_file(tmp_path / "wide" / "export" / "model" / "model.safetensors")
    folder = tmp_path / "half" / "export" / "model"
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, exact[name].to(dtype)), name  # the delta was added in float32
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == dtype


def test_adapters_alone_are_a_folder_that_peft_loads(base: str, tmp_path: Path) -> None:
    unfused = adapted(base, tmp_path / "adapter", target_modules="all-linear", use_rslora=True)
    exported(tmp_path / "adapter", base, tmp_path / "run", "export.adapter_only=true")
    folder = tmp_path / "run" / "export" / "model"
    assert not (folder / "model.safetensors").exists()
    from peft import AutoPeftModelForCausalLM

    again = logits(AutoPeftModelForCausalLM.from_pretrained(folder).eval())
    assert torch.allclose(again, unfused, atol=1e-6)  # loading ours may choose quicker products
    with pytest.raises(ConfigError, match="keeps no adapters"):
        exported(Path(base), base, tmp_path / "none", "export.adapter_only=true")


@pytest.mark.parametrize("targets", [ATTENTION, [*ATTENTION, "lm_head", "embed_tokens"]], ids=str)
@pytest.mark.parametrize("alone", ["true", "false"])
def test_a_tokenizer_may_have_ids_without_a_row(
    alone: str, targets: list[str], base: str, tmp_path: Path
) -> None:
    adapted(base, tmp_path / "adapter", target_modules=targets)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    facts = exported(tmp_path / "adapter", base, tmp_path / "run", f"export.adapter_only={alone}")
    assert facts["fused_difference"] <= 1e-4


def test_nothing_but_an_earlier_export_is_replaced(tiny_lm: str, tmp_path: Path) -> None:
    base, source, to = tmp_path / "base", tmp_path / "adapter", tmp_path / "to"
    shutil.copytree(tiny_lm, base)
    adapted(str(base), source, target_modules=ATTENTION)
    (tmp_path / "link").symlink_to(to)
    shutil.copytree(tiny_lm, tmp_path / "mine")
    for target, why in (
        (base, "is the base of what is exported"),
        (source, "is what is exported"),
        (tmp_path / "link", "is a link"),
        (tmp_path / "mine", "holds other things than an earlier export"),
    ):
        held = {file.name: file.read_bytes() for file in target.iterdir()} if target.exists() else {}
        with pytest.raises(ConfigError, match=why):
            exported(source, str(base), tmp_path / "run", f"export.to={target}")
        assert held == ({file.name: file.read_bytes() for file in target.iterdir()} if held else {})
    to.mkdir()
    for _ in range(2):  # an empty folder, then the earlier export
        exported(source, str(base), tmp_path / "run", f"export.to={to}")
    with pytest.raises(ConfigError, match="is what is exported"):
        exported(to, str(base), tmp_path / "run", f"export.to={to}")


def test_a_full_disk_while_rounding_is_said(tiny_lm: str, tmp_path: Path, full_disk: Any) -> None:
    shutil.copytree(tiny_lm, tmp_path / "half")
    with full_disk(1000), pytest.raises(CheckpointError, match=r"cannot be written .*free space"):
        cast_folder(tmp_path / "half", torch.bfloat16)


def test_adapters_in_no_safetensors_file_are_not_exported_alone(tiny_lm: str, tmp_path: Path) -> None:
    adapted(tiny_lm, tmp_path / "adapter", target_modules=ATTENTION)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors; save"):
        exported(tmp_path / "adapter", tiny_lm, tmp_path / "run", "export.adapter_only=true")


def test_training_keeps_its_adapters_beside_the_fused_weights(base: str, tmp_path: Path) -> None:
    actor = load_actor(base, lora_rank=4, lora_alpha=8, seed=3)
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    actor.save(tmp_path / "best")
    facts = exported(tmp_path / "best", base, tmp_path / "run")
    assert facts["fused_difference"] <= 1e-4
    facts = exported(tmp_path / "best", base, tmp_path / "alone", "export.adapter_only=true")
    assert facts["base"] == str(Path(base).absolute())


def test_weights_that_are_not_the_fused_ones_are_not_exported(base: str, tmp_path: Path) -> None:
    actor = load_actor(base, lora_rank=4, lora_alpha=8)
    for name, parameter in actor.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    actor.save(tmp_path / "best")
    kept = tmp_path / "best" / "adapter" / "adapter_model.safetensors"
    save_file({name: 1.5 * tensor for name, tensor in load_file(kept).items()}, kept)
    with pytest.raises(CheckpointError, match=r"logits that differ by .* not exported"):
        exported(tmp_path / "best", base, tmp_path / "run")
    assert not (tmp_path / "run" / "export" / "model").exists()


def renamed(name: str) -> str:
    return name.replace("base_model.model.", "base_model.model._orig_mod.")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()},
        lambda tensors: {name: tensor for name, tensor in tensors.items() if "layers.0" not in name},
        lambda tensors: tensors | {renamed(name): tensor.clone() for name, tensor in tensors.items()},
    ],
    ids=["renamed", "lacking", "more"],
)
def test_adapters_that_do_not_load_are_an_error(change: Any, tiny_lm: str, tmp_path: Path) -> None:
    adapted(tiny_lm, tmp_path / "adapter", target_modules="all-linear")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    load_actor(str(tmp_path / "adapter"))
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"adapters do not fit .* first .*lora_"):
        load_actor(str(tmp_path / "adapter"))


def test_a_critic_starts_from_adapters_on_a_policys_head(tiny_lm: str, tmp_path: Path) -> None:
    adapted(tiny_lm, tmp_path / "adapter", target_modules=[*ATTENTION, "lm_head"], task_type=None)
    load_critic(str(tmp_path / "adapter"))


@pytest.mark.parametrize("kind", ["critic", "reward"])
def test_critic_and_reward_model_are_exported_too(kind: str, base: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    critic = load_critic(base)
    torch.nn.init.normal_(critic.model.score.weight, generator=torch.Generator().manual_seed(0))
    critic.save(tmp_path / "made")
    facts = exported(tmp_path / "made", base, tmp_path / "run", f"export.kind={kind}")
    assert not facts["gate"]["asked"]
    folder = tmp_path / "run" / "export" / kind
    plain = AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(plain.score.weight, critic.model.score.weight)
    assert f"# run: {kind}" in (folder / "README.md").read_text()


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    model = LLM(sys.argv[1], dtype="float32", max_model_len=96, enforce_eager=True)
    asked = json.load(open(sys.argv[2]))
    sampling = SamplingParams(temperature=0, max_tokens=12)
    found = model.generate([{"prompt_token_ids": ids} for ids in asked], sampling)
    print("ANSWERS", json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""


@pytest.mark.slow
def test_vllm_answers_as_evaluate_said(tmp_path: Path) -> None:
    """REIN_VLLM_PYTHON names the interpreter of an environment with vllm in it."""
    python = os.environ.get("REIN_VLLM_PYTHON")
    if python is None:
        pytest.skip("REIN_VLLM_PYTHON is not given")
    asked, said = evaluated(tmp_path)
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    (tmp_path / "ask.py").write_text(VLLM)
    command = [python, tmp_path / "ask.py", tmp_path / "run" / "export" / "model", tmp_path / "asked.json"]
    own = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | own)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("ANSWERS"))
    assert json.loads(line.removeprefix("ANSWERS")) == said


def test_plain_transformers_answers_as_evaluate_said(tmp_path: Path) -> None:
    asked, said = evaluated(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export" / "model").eval()
    for ids, answer in zip(asked, said, strict=True):
        found = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
        assert found[0, len(ids) :].tolist() == answer


def evaluated(folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Evaluate and export adapters on a tiny model; prompts and greedy answers as ids."""
    import pyarrow.parquet as pq

    tiny_lm = str(make_tiny(folder / "lm", seed=0, hidden=128, layers=2))  # heads as wide as vllm's are
    adapted(tiny_lm, folder / "adapter", target_modules="all-linear")
    rows = [{"prompt": f"{i}+{7 * i}=", "reward_model": {"ground_truth": str(8 * i)}} for i in range(12)]
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = f"""
        out={folder}/run model.path={tiny_lm} evaluate.files={folder}/test.jsonl evaluate.before={tiny_lm}
        evaluate.after={folder}/adapter export.path={folder}/adapter evaluate.pass_k=0
        data.max_response_length=12 stages=[evaluate,export] gate.enable=false score.reward=length
    """.split()
    words[-1] = "score.reward={name: length, options: {target: 4}}"
    pipeline.run(load(None, words)[0], Console(quiet=True))
    answers = pq.read_table(folder / "run" / "evaluate" / "answers.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(tiny_lm)
    asked = [tokenizer(row["prompt"], add_special_tokens=False)["input_ids"] for row in answers]
    return asked, [row["after_ids"] for row in answers]
