"""Compiled steps give what the written ones give, for every length; a machine without compiler is told."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from rein.models.elementwise import STEPS, _gate, _gate_gradients, _norm, _norm_gradients


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own, on first use
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_steps_are_the_written_ones(dtype: torch.dtype) -> None:
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.02}
    compiled = {step.written: torch.compile(step.written, dynamic=True) for step in STEPS}
    for rows in (3, 70, 129):
        x, grad, u = (drawn(rows, 1, 48, dtype=dtype) * scale for scale in (1, 0.5, 2))
        weight = drawn(48, dtype=dtype)
        r = _norm(x, weight, 1e-6)[1]
        for function, given in (
            (_norm, (x, weight, 1e-6)),
            (_norm_gradients, (grad, x, weight, r)),
            (_gate, (x, u)),
            (_gate_gradients, (grad, x, u)),
        ):
            own, found = function(*given), compiled[function](*given)
            own, found = ([one] if isinstance(one, Tensor) else one for one in (own, found))
            for one, other in zip(own, found, strict=True):
                assert one.dtype == other.dtype
                torch.testing.assert_close(other, one, **near)


@pytest.mark.long
def test_a_machine_without_a_compiler_is_told() -> None:
    code = "from rein.models.elementwise import compile_steps; compile_steps()"
    hidden = os.environ | {"CXX": "/nowhere/g++", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=hidden)
    assert done.returncode
    assert "model.use_torch_compile: this machine cannot compile (" in done.stderr
    assert "install a C++ compiler" in done.stderr
