"""V(s) is read at the state before each response token, whatever the pack and the temperature."""

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from rows_made import Row, random_rows, row
from torch import Tensor
from training_made import gradients_of

from rein.models.critic import Critic, load_critic
from rein.models.load import trunk_of


@pytest.fixture(scope="module")
def critic(tiny_lm: str) -> Critic:
    """With a head that says something."""
    made = load_critic(tiny_lm, dtype="float64")
    with torch.no_grad():
        made.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return made


def own_values(critic: Critic, some: Row) -> Tensor:
    """The head on the model's own last states, from the last prompt token to the last but one."""
    ids = torch.from_numpy(np.concatenate([some.prompt_ids, some.response_ids]))
    out = trunk_of(critic.model)(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None])
    states = out.last_hidden_state[0, len(some.prompt_ids) - 1 : -1]
    return (states @ critic.model.score.weight.T).squeeze(-1)


def test_a_new_critic_says_zero(tiny_lm: str) -> None:
    with torch.no_grad():
        assert not load_critic(tiny_lm).values(random_rows(4)).any()


def test_values_are_those_of_the_states_before_the_tokens(critic: Critic) -> None:
    rows = random_rows(9, seed=1)
    with torch.no_grad():
        found = critic.values(rows)
        for i, some in enumerate(rows):
            own = own_values(critic, some)
            torch.testing.assert_close(found[i, : len(own)], own, atol=1e-9, rtol=0)
            assert not found[i, len(own) :].any()


def test_a_value_never_looks_at_the_token_it_precedes(critic: Critic) -> None:
    with torch.no_grad():
        one = critic.values([row([3, 4], [5, 6, 7])])[0]
        other = critic.values([row([3, 4], [5, 9, 7])])[0]
    torch.testing.assert_close(one[:2], other[:2], atol=1e-12, rtol=0)
    assert (one[2] - other[2]).abs() > 1e-6


def test_rows_of_a_pack_do_not_see_each_other(critic: Critic) -> None:
    b = row([4, 5], [6, 7])
    with torch.no_grad():
        one, other = critic.values([row([1, 2], [3]), b]), critic.values([row([9, 8], [7]), b])
    torch.testing.assert_close(one[1], other[1], atol=1e-9, rtol=0)


def test_gradients_through_a_pack_are_those_of_the_rows_alone(critic: Critic) -> None:
    rows = random_rows(5, seed=2)
    together = gradients_of(critic.model, critic.values(rows).square().sum())
    alone = torch.stack([own_values(critic, some).square().sum() for some in rows])
    apart = gradients_of(critic.model, alone.sum())
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


def test_temperature_has_no_way_into_the_critic() -> None:
    assert list(inspect.signature(Critic.values).parameters) == ["self", "rows"]


def test_a_saved_critic_comes_back_with_its_head(critic: Critic, tmp_path: Path) -> None:
    critic.save(tmp_path / "critic")
    back = load_critic(str(tmp_path / "critic"), dtype="float64")
    rows = random_rows(4)
    with torch.no_grad():
        torch.testing.assert_close(back.values(rows), critic.values(rows), atol=1e-12, rtol=0)


def test_values_are_at_least_float32(tiny_lm: str) -> None:
    critic = load_critic(tiny_lm)
    critic.model.to(torch.bfloat16)
    assert critic.values(random_rows(2)).dtype == torch.float32
