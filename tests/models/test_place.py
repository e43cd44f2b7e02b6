"""A model lies where the recipe says; on another device than the CPU it answers the same."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rein.config.recipe import Model
from rein.errors import ConfigError
from rein.models.place import CPU, Place, place_of

TESTS = Path(__file__).parent.parent
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, id="plain"), pytest.param({"lora_rank": 4}, id="lora", marks=pytest.mark.slow)],
)
def test_nothing_depends_on_where_a_model_lies(tiny_lm: str, options: dict[str, Any]) -> None:
    words = [tiny_lm, json.dumps(options | {"dtype": "float64"})]
    path = os.pathsep.join([str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "another_device.py"), *words],
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    apart = json.loads(done.stdout)
    assert len(apart) > 20
    moved = {name: value for name, value in apart.items() if value > 1e-9}
    assert not moved


@without_gpu
def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert place_of(Model()) == place_of(Model(device="cpu")) == CPU


@without_gpu
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Model(device="cuda"), "model.device: cuda, but torch sees no GPU here"),
        (Model(use_liger=True), "model.use_liger: is for a GPU"),
        (Model(attn_implementation="varlen"), "model.attn_implementation: is for a GPU"),
    ],
)
def test_what_needs_a_gpu_is_refused_where_there_is_none(model: Model, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place_of(model)


def test_what_is_kept_of_a_frozen_model_tells_its_kernels_apart() -> None:
    names = {Place(*each).numbers for each in (("cpu",), ("cuda",), ("cuda", "sdpa"), ("cuda", "sdpa", True))}
    assert len(names) == 4
    assert CPU.numbers == "cpu"
