"""SFT mixing: the loss of both kinds of rows over the tokens of both, whatever the cut, and nothing else."""

from typing import Any

import pytest
import torch
from rows_made import Row, own_log_probs, random_trajectories
from torch import Tensor
from training_made import ROWS, experience_of, gradients, learner_of, models, moved, recipe

from rein.data.mixing import Mixing
from rein.learner import Learner
from rein.models.actor import Actor
from rein.types import Demonstration, Experience, Metrics, Softening, Update

MIXED = random_trajectories(ROWS, holes=True, temperatures=(1.0, 0.6))
SHOWN = [
    Demonstration(row.where, row.prompt_ids, row.response_ids, row.response_mask)
    for row in random_trajectories(9, seed=4, holes=True)
]
ALL = tuple(range(ROWS))
CUTS: list[dict[str, Any]] = [
    {"ppo_max_token_len_per_gpu": 1},
    {"ppo_max_token_len_per_gpu": 23},
    {"use_dynamic_bsz": False, "ppo_micro_batch_size": 1},
    {"use_dynamic_bsz": False, "ppo_micro_batch_size": 5},
]


def made(path: str, share: float, coef: float = 1.0, **actor: Any) -> tuple[Learner, Experience]:
    """A learner some steps away from the policy of its experience, demonstrations beside it."""
    mixing = Mixing(SHOWN, share, seed=0, shuffle=True) if share else None
    some = recipe(actor=actor, sft={"share": share, "coef": coef})
    actors, critic = models(path, "float64")
    experience = experience_of(some, actors, critic, MIXED)
    moved(actors.model, 1)
    return learner_of(some, actors, critic, demonstrations=mixing), experience


def backward(learner: Learner, e: Experience, role: str = "actor") -> tuple[list[Tensor], Metrics]:
    metrics = learner.backward(Update(role, ALL, 0), e)
    model = learner.actor.model if role == "actor" else learner.critic.model  # type: ignore[union-attr]
    return gradients(model), metrics


def nll(actor: Actor, rows: list[Demonstration]) -> tuple[Tensor, int]:
    """The sum of counted tokens' NLL, each row through the model's own forward, and their number."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        said = own_log_probs(actor.model, Row(row.prompt_ids, row.response_ids))
        total = total - said[torch.from_numpy(row.response_mask)].sum()
    return total, sum(int(row.response_mask.sum()) for row in rows)


@pytest.mark.parametrize("coef", [1.0, 0.3])
def test_both_kinds_of_rows_share_one_denominator(coef: float, tiny_lm: str) -> None:
    alone, e = made(tiny_lm, 0.0)
    theirs, said = backward(alone, e)
    learner, e = made(tiny_lm, 0.3, coef)
    assert learner.imitation is not None
    shown = learner.imitation.demonstrations.beside(ROWS)
    assert len(shown) == 3
    found, metrics = backward(learner, e)
    total, count = nll(learner.actor, shown)  # type: ignore[arg-type]
    total.backward()  # type: ignore[no-untyped-call]
    tokens = int(e.response_mask.sum())
    for one, rl, sft in zip(found, theirs, gradients(learner.actor.model), strict=True):
        # The model's norms are float32 in any precision: gradients of another size are rounded otherwise.
        torch.testing.assert_close(one, (tokens * rl + coef * sft) / (tokens + count), atol=1e-7, rtol=1e-6)
    assert metrics["actor/sft_rows"] == 3
    assert metrics["actor/sft_loss"] == pytest.approx(total.item() / count, rel=1e-9)
    whole = (tokens * said["actor/loss"] + coef * total.item()) / (tokens + count)
    assert metrics["actor/loss"] == pytest.approx(whole, rel=1e-9)


def test_the_cut_into_micro_batches_changes_neither_gradients_nor_metrics(tiny_lm: str) -> None:
    whole, said = backward(*made(tiny_lm, 0.3))
    for cut in CUTS:
        parts, also = backward(*made(tiny_lm, 0.3, **cut))
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
        assert also == pytest.approx(said, rel=1e-9, abs=1e-12)


def test_demonstrations_follow_a_halved_token_budget(tiny_lm: str) -> None:
    """Memory that ran out by them is not asked for again."""
    learner, e = made(tiny_lm, 1.0)
    whole, said = backward(learner, e)
    assert learner.imitation is not None
    shown = learner.imitation.demonstrations.beside(ROWS)
    longest = max(len(row.prompt_ids) + len(row.response_ids) for row in shown)
    learner.soften(Softening(token_budget=longest / 4096))
    parts, also = backward(learner, e)
    assert len(learner.imitation._cut(shown, learner.token_budget)) > 1
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)
    assert also == pytest.approx(said, rel=1e-9, abs=1e-12)


def test_demonstrations_leave_every_other_number_and_the_critic_alone(tiny_lm: str) -> None:
    (alone, e), (mixed, same) = made(tiny_lm, 0.0), made(tiny_lm, 0.3)
    assert torch.equal(e.advantages, same.advantages)
    assert e.metrics == same.metrics
    (_, said), (_, also) = backward(alone, e), backward(mixed, same)
    moved_by = {name for name in also if also[name] != said.get(name)}
    assert moved_by == {"actor/loss", "actor/grad_norm", "actor/sft_loss", "actor/sft_rows"}
    (one, said), (other, also) = backward(alone, e, "critic"), backward(mixed, same, "critic")
    assert said == also
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_where_no_row_falls_in_nothing_is_added(tiny_lm: str) -> None:
    (alone, e), (mixed, same) = made(tiny_lm, 0.0), made(tiny_lm, 0.05)  # .05 x 12 rows: none yet
    (one, said), (other, also) = backward(alone, e), backward(mixed, same)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert also == said | {"actor/sft_rows": 0}
    mixed.apply("actor")
    assert backward(mixed, same)[1]["actor/sft_rows"] == 1  # 1.2 rows by then


@pytest.mark.parametrize("after", ["apply", "discard"])
def test_demonstrations_pass_by_with_their_update_and_only_then(after: str, tiny_lm: str) -> None:
    learner, e = made(tiny_lm, 0.3)
    assert learner.imitation is not None
    cursor = learner.imitation.demonstrations
    first = [row.where for row in cursor.beside(ROWS)]
    backward(learner, e)
    backward(learner, e)  # the same rows again, as after a shortage of memory
    assert [row.where for row in cursor.beside(ROWS)] == first
    backward(learner, e, "critic")
    learner.discard("critic")
    assert cursor.seen == 0
    backward(learner, e)
    getattr(learner, after)("actor")
    assert cursor.seen == ROWS
    assert [row.where for row in cursor.beside(ROWS)] != first


def test_a_restored_learner_takes_the_demonstrations_that_come_next(tiny_lm: str) -> None:
    straight, e = made(tiny_lm, 0.3)
    backward(straight, e)
    straight.apply("actor")
    tensors, meta = straight.state()
    resumed, _ = made(tiny_lm, 0.3)
    resumed.restore({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    (one, said), (other, also) = backward(straight, e), backward(resumed, e)
    assert said == also
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_updates_make_demonstrations_likelier(tiny_lm: str) -> None:
    learner, e = made(tiny_lm, 1.0)
    e.advantages.zero_()
    losses = []
    for _ in range(6):
        losses.append(backward_and_apply(learner, e))
    assert losses[-1] < losses[0] - 0.1


def backward_and_apply(learner: Learner, e: Experience) -> float:
    metrics = learner.backward(Update("actor", ALL, 0), e)
    learner.apply("actor")
    return metrics["actor/sft_loss"]
