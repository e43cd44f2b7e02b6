"""Training with the critic on the actor's trunk is training with a critic apart: to the last bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import LR, Course, events, guarded, logged, put_back, ran, same, same_end, weights

from rein.config.recipe import Recipe
from rein.models.critic import load_critic
from rein.stages.train import rehearse
from rein.stages.train_open import open_job
from rein.tracking.console import Console

KINDS: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "checkpointing": {"dtype": "float64", "enable_gradient_checkpointing": True},
    "fast, checkpointing": {"precision": "fast", "enable_gradient_checkpointing": True},
}
TRAINER = {"critic_warmup": 3, "total_epochs": 1}


def job_of(tiny: Path, folder: Path, out: str, *, share: bool = True, **more: Any) -> Recipe:
    """A fit of three updates, then four of each role in two batches; the reference is over the vocabulary."""
    model = {"lora_rank": 2} | more.pop("model", {})
    critic = {"model": {"share_trunk": share}, "fit_until": 1.0}
    actor = {"kl_loss_type": "full", "optim": {"lr": LR}}
    sections: dict[str, Any] = {"trainer": TRAINER, "model": model, "critic": critic, "actor": actor}
    return guarded(str(tiny), folder, out, **sections | more)


@pytest.mark.parametrize(
    "kind", ["float64", *(pytest.param(k, marks=pytest.mark.long) for k in [*KINDS][1:])]
)
def test_shared_or_apart_both_roles_end_with_the_same_weights(kind: str, tiny: Path, tmp_path: Path) -> None:
    shared, apart = (
        job_of(tiny, tmp_path, out, share=out == "shared", model=KINDS[kind]) for out in ("shared", "apart")
    )
    assert ran(shared)["updates"] == ran(apart)["updates"] == 3 + 2 * 8
    for which in ("last", "critic", "best"):
        found, wanted = weights(shared, which), weights(apart, which)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, wanted[name], atol=1e-9, rtol=0)
    assert logged(shared) == logged(apart)
    start = load_critic(str(tiny), dtype=shared.model.dtype).model.state_dict()
    moved = {
        name for name, tensor in weights(shared, "critic").items() if not torch.equal(tensor, start[name])
    }
    assert any("up_proj" in name for name in moved)
    assert "score.weight" in moved
    path = str(Path(shared.out) / "train" / "critic")
    assert same(
        dict(load_critic(path, dtype=shared.model.dtype).model.state_dict()), weights(shared, "critic")
    )


@pytest.mark.long
@pytest.mark.parametrize("stop_at", [2, 5, 10], ids=["in the fit", "in the critic's", "in the actor's"])
def test_a_run_that_is_broken_off_ends_bit_equal(stop_at: int, tiny: Path, tmp_path: Path) -> None:
    straight, broken = (job_of(tiny, tmp_path, out) for out in ("straight", "broken"))
    whole = Course(straight).run()
    assert Course(broken, stop_at=stop_at).run().facts is None
    rest = Course(broken)
    state = rest.job.learner.state()[0]
    assert same(state, whole.after[stop_at]["tensors"])
    names = {role: {n for n, _ in held.named} for role, held in rest.job.learner.optimizers.items()}
    assert names["critic"] == names["actor"] | {"score.weight"}
    rest.run()
    last = max(whole.after)
    assert same(rest.after[last]["tensors"], whole.after[last]["tensors"])
    assert rest.after[last]["meta"] == whole.after[last]["meta"]
    assert logged(broken) == logged(straight)
    assert same_end(straight, broken)


@pytest.mark.long
def test_a_rollback_puts_both_roles_back_and_leaves_the_trunk(tiny: Path, tmp_path: Path) -> None:
    rule = {"metric": "actor/lr", "above": 0.6 * LR, "for": 6, "then": ["rollback", {"lr": 0.5}], "name": "t"}
    points = {"preset": "off", "rules": [rule], "snapshot_every": 99}
    some = job_of(tiny, tmp_path, "run", guards=points)
    course = Course(some)
    assert course.job.critic is not None
    frozen = [p for p in course.job.critic.model.parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    course.run()
    (back,) = events(some, "rollback")
    target, left = course.after[back["to"]], course.after[back["from"]]
    assert put_back(course.rollbacks[0], target) == []
    at_target = target["tensors"].items()
    moved = {n.split("/")[0] for n, tensor in at_target if not torch.equal(tensor, left["tensors"][n])}
    assert moved == {"actor", "critic"}
    assert all(torch.equal(p, old) for p, old in zip(frozen, before, strict=True))


def test_what_the_critic_adds_is_said_and_is_no_second_model(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = open_job(job_of(tiny, tmp_path, "run"), Console(), rehearsal=True)
    assert "critic: adapters and a head on the actor's trunk, 0.0 MiB" in capsys.readouterr().out
    assert job.critic is not None
    models = (job.actor.model, job.critic.model, job.probe.head)
    held = {t.data_ptr(): t.nbytes for m in models[:2] for t in m.parameters()}
    own = sum(p.nbytes for m in models[:2] for p in m.parameters() if p.requires_grad)
    one = sum(p.nbytes for p in load_critic(str(tiny)).model.parameters())
    assert sum(held.values()) - own <= one  # the tied head is the embeddings
    assert job.maker.reference is not None
    assert job.maker.reference.bytes == 0


def test_a_rehearsal_trains_both_roles(tiny: Path, tmp_path: Path) -> None:
    found = rehearse(job_of(tiny, tmp_path, "run"), Console(quiet=True))
    assert found["critic/grad_norm"] > 0
    assert found["actor/grad_norm"] > 0
