"""A learner takes a whole state that fits it, or nothing of it, and says which part does not fit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows_made import random_trajectories
from training_made import ROWS, experience_of, learner_of, models, recipe

from rein.errors import CheckpointError
from rein.types import Update

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors, dict[str, Any]], object]


def first(tensors: Tensors, start: str) -> str:
    return next(name for name in tensors if name.startswith(start))


ODD: dict[str, tuple[str, Change]] = {
    "no actor": ("actor/weight/.* is missing", lambda t, m: [t.pop(n) for n in [*t] if n[:6] == "actor/"]),
    "a weight of the critic less": (
        "critic/weight/score.weight is missing",
        lambda t, m: t.pop("critic/weight/score.weight"),
    ),
    "a moment of the critic less": (
        "critic/exp_avg_sq/.* is missing",
        lambda t, m: t.pop(first(t, "critic/exp_avg_sq/")),
    ),
    "a weight of another shape": (
        r"critic/weight/score.weight is float32 \[1\], not float32",
        lambda t, m: t.update({"critic/weight/score.weight": torch.zeros(1)}),
    ),
    "a weight of another kind": (
        "critic/weight/score.weight is float16",
        lambda t, m: t.update({"critic/weight/score.weight": t["critic/weight/score.weight"].half()}),
    ),
    "a weight too many": (
        "critic/weight/bias belongs to no weight that is trained",
        lambda t, m: t.update({"critic/weight/bias": torch.zeros(1)}),
    ),
    "a third role": (
        "judge/weight/x belongs to no role of this run",
        lambda t, m: t.update({"judge/weight/x": torch.zeros(1)}),
    ),
    "no counters of the critic": ("critic is missing", lambda t, m: m.pop("critic")),
    "no coefficient": ("kl_coef_in_loss is missing", lambda t, m: m.pop("kl_coef_in_loss")),
    "counters of a third role": ("judge belongs to no role", lambda t, m: m.update({"judge": {}})),
}


@pytest.mark.parametrize("what", list(ODD))
def test_a_state_that_does_not_fit_is_named_and_no_role_takes_of_it(what: str, tiny_lm: str) -> None:
    some, (actor, critic) = recipe(), models(tiny_lm)
    learner = learner_of(some, actor, critic)
    e = experience_of(some, actor, critic, random_trajectories(ROWS))
    for role in ("actor", "critic"):
        learner.backward(Update(role, tuple(range(ROWS)), 0), e)
        learner.apply(role)
    found, meta = learner.state()
    tensors = {name: tensor + 1 for name, tensor in found.items()}  # what must not arrive
    before = {name: tensor.clone() for name, tensor in found.items()}
    said, change = ODD[what]
    change(tensors, meta)
    with pytest.raises(CheckpointError, match=f"snapshot: {said}.*resume from another snapshot"):
        learner.restore(tensors, meta)
    after, _ = learner.state()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
