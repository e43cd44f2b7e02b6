"""What a core does at best: measured once, quickly, with nothing moved."""

import time

import pytest
import torch

from rein.runtime.peak import core_flops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peak_is_above_what_any_product_reaches_and_takes_little(dtype: torch.dtype) -> None:
    core_flops.cache_clear()
    drawn, threads = torch.get_rng_state(), torch.get_num_threads()
    began = time.process_time()
    peak = core_flops(dtype)
    assert time.process_time() - began < 0.5
    assert torch.equal(drawn, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    x = torch.ones(300, 300, dtype=dtype)
    began = time.process_time()
    x @ x
    assert 2 * 300**3 / (time.process_time() - began) < 1.5 * peak
    assert core_flops(dtype) == peak
