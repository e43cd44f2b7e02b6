"""Stored rows for the reward tests."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rein.types import Trajectory

MakeRow = Callable[..., Trajectory]


@pytest.fixture
def row() -> MakeRow:
    def make(
        response: str, truth: Any = None, *, prompt: str = "q", tokens: int = 3, **columns: Any
    ) -> Trajectory:
        return Trajectory(
            where="made.parquet row 7",
            messages=prompt,
            prompt_ids=np.array([5, 6]),
            response_ids=np.arange(tokens),
            response_mask=np.ones(tokens, dtype=bool),
            response=response,
            ground_truth=truth,
            **columns,
        )

    return make
