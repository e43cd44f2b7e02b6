"""What is begun ahead on crews changes nothing: crews of this process beside one learner of both roles."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from rows_made import random_trajectories
from training_made import experience_of, learner_of, models, recipe

from rein.config.recipe import Recipe
from rein.learner import Learner, RemoteLearner
from rein.runtime.crews import Crews
from rein.types import Experience, Softening

SMALL = {"ppo_mini_batch_size": 3, "ppo_epochs": 2, "optim": {"lr": 1e-2}}


class CrewHere:
    """A crew of one: it does what it is asked at once, in order, as a worker does."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.calls = learner, list[str]()
        self.failed: Exception | None = None

    def begin(self, name: str, method: str, *given: Any) -> Any:
        self.calls.append(f"{method} {getattr(given[0], 'role', given[0])}" if given else method)
        try:
            return getattr(self.learner, method)(*given)
        except ArithmeticError as error:
            return error

    def send(self, name: str, method: str, *given: Any) -> None:
        self.leave(self.begin(name, method, *given))

    def leave(self, asked: Any) -> None:
        self.failed = asked if isinstance(asked, Exception) else self.failed

    def answer(self, asked: Any) -> Any:
        for found in (self.failed, asked):
            if isinstance(found, Exception):
                raise found
        return asked

    def call(self, name: str, method: str, *given: Any) -> Any:
        return self.answer(self.begin(name, method, *given))


class Apart:
    """Actor and critic on crews of their own, and the learner that drives them."""

    def __init__(self, some: Recipe, path: str) -> None:
        actor, critic = models(path, "float64")
        self.crews = {
            "actor": CrewHere(learner_of(some, actor, None)),
            "critic": CrewHere(_of_critic(some, critic)),
        }
        of = cast(Crews, Crews(cast(Any, self.crews), 1))
        self.learner = RemoteLearner(
            some, of, ("critic", "actor"), kl_coef_in_loss=0.05, kl_coef_in_reward=0.05
        )

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{role}/{name}": tensor.detach().clone()
            for role, crew in self.crews.items()
            for name, tensor in crew.learner.models[role].model.named_parameters()
        }


def _of_critic(some: Recipe, critic: Any) -> Learner:
    found = learner_of(some, cast(Any, None), critic)
    assert found.roles == ("critic",)
    return found


class Together:
    """The same in one learner."""

    def __init__(self, some: Recipe, path: str) -> None:
        self.models = models(path, "float64")
        self.learner = learner_of(some, *self.models)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{role}/{name}": tensor.detach().clone()
            for role, model in zip(("actor", "critic"), self.models, strict=True)
            for name, tensor in model.model.named_parameters()
        }


def separate(**actor: Any) -> Recipe:
    return recipe(actor=SMALL | actor, critic={"placement": "separate", "optim": {"lr": 1e-2}})


Act = Callable[[Any, str, int], None]  # learner, role, number of the update


def run(side: Apart | Together, some: Recipe, e: Experience, act: Act) -> list[dict[str, float]]:
    """A batch as the loop makes it: what `act` does between two updates, and what each said."""
    learner: Any = side.learner
    said, done, plan = [], 0, side.learner.updates(len(e.rows), 0)
    while done < len(plan):
        update = plan[done]
        if update.rows:
            said.append(dict(learner.backward(update, e)))
            act(learner, update.role, done)
        done += 1
        plan = side.learner.updates(len(e.rows), 0)
    return said


def applied(learner: Any, role: str, number: int) -> None:
    learner.apply(role)


def skipping(learner: Any, role: str, number: int) -> None:
    (learner.discard if number % 3 == 1 else learner.apply)(role)


def softening(learner: Any, role: str, number: int) -> None:
    learner.apply(role)
    if number in (2, 5):
        learner.soften(replace(learner.soft, lr=0.5 / number, kl_coef=1.5))


def shorter(learner: Any, role: str, number: int) -> None:
    learner.apply(role)
    if number == 3:
        learner.soften(Softening(ppo_epochs=-1))


def longer(learner: Any, role: str, number: int) -> None:
    learner.apply(role)
    if number == 3:
        learner.soften(Softening(ppo_epochs=1))


def controlled(learner: Any, role: str, number: int) -> None:
    learner.apply(role)
    if number == 4:
        learner.control_kl(0.3, 12, 0.5)


@pytest.mark.parametrize("act", [applied, skipping, softening, shorter, longer, controlled])
def test_what_is_begun_ahead_changes_no_number(act: Act, tiny_lm: str) -> None:
    some = separate()
    e = experience_of(some, *models(tiny_lm, "float64"), random_trajectories(12))
    one, other = Together(some, tiny_lm), Apart(some, tiny_lm)
    said, apart = run(one, some, e, act), run(other, some, e, act)
    assert said == apart
    assert len(said) > 10
    for name, tensor in one.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name


def test_the_next_update_of_the_other_role_is_begun_before_this_one_is_waited_for(tiny_lm: str) -> None:
    some = separate()
    e = experience_of(some, *models(tiny_lm, "float64"), random_trajectories(12))
    side = Apart(some, tiny_lm)
    plan = side.learner.updates(12, 0)
    assert [update.role for update in plan[:4]] == ["critic", "actor", "critic", "actor"]
    side.learner.backward(plan[0], e)
    assert side.crews["actor"].calls == ["backward actor"]
    side.learner.apply("critic")
    side.learner.backward(plan[1], e)
    assert side.crews["actor"].calls == ["backward actor"]
    assert side.crews["critic"].calls == ["backward critic", "apply critic", "backward critic"]


def test_a_role_that_is_over_is_not_computed_ahead(tiny_lm: str) -> None:
    some = separate()
    e = experience_of(some, *models(tiny_lm, "float64"), random_trajectories(12))
    side = Apart(some, tiny_lm)
    for update in side.learner.updates(12, 0):
        if update.role == "critic":
            side.learner.backward(update, e)
            side.learner.apply("critic")
        else:
            side.learner.discard("actor", len(update.rows))
    assert side.crews["actor"].calls.count("backward actor") == 1


def test_a_failure_of_what_was_dropped_is_still_raised(tiny_lm: str) -> None:
    some = separate()
    e = experience_of(some, *models(tiny_lm, "float64"), random_trajectories(12))
    side = Apart(some, tiny_lm)
    plan = side.learner.updates(12, 0)

    def broken(*_: Any) -> None:
        raise ArithmeticError("of one rank")

    side.crews["actor"].learner.backward = broken  # type: ignore[method-assign, assignment]
    side.learner.backward(plan[0], e)
    side.learner.soften(Softening(lr=0.5))
    with pytest.raises(ArithmeticError, match="of one rank"):
        side.learner.meta()


@pytest.mark.parametrize("before", [-1, 0, 1])
@pytest.mark.parametrize("after", [-1, 0, 1])
def test_what_is_done_stays_the_first_part_of_a_plan_that_remedies_change(
    before: int, after: int, tiny_lm: str
) -> None:
    some = separate()
    learner = learner_of(some, *models(tiny_lm))
    learner.soft = Softening(ppo_epochs=before)
    one = learner.updates(12, 0)
    learner.soft = Softening(ppo_epochs=after)
    other = learner.updates(12, 0)
    for a, b in zip(one, other, strict=False):
        assert a.role == b.role
        assert not a.rows or not b.rows or a.rows == b.rows
