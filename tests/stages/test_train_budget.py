"""The token budget `auto` is chosen once from timings and kept; nothing else of a run hangs on it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from rows_made import random_trajectories
from training_made import recipe

from rein.config.load import load
from rein.models.actor import Actor, load_actor
from rein.stages import train_budget
from rein.stages.train_budget import FILE, quickest, time_budgets, with_budget
from rein.tracking.console import Console
from rein.types import Trajectory

AUTO = {"ppo_max_token_len_per_gpu": "auto"}


def test_the_smallest_budget_about_as_quick_as_the_quickest_is_taken() -> None:
    assert quickest({512: 1.02, 1024: 1.0, 2048: 1.2}) == 512
    assert quickest({512: 1.2, 1024: 1.0, 2048: 0.8}) == 2048


def test_auto_is_a_value_of_the_key_and_other_words_are_not() -> None:
    found, _ = load(None, ["model.path=m", "actor.ppo_max_token_len_per_gpu=auto"])
    assert found.actor.ppo_max_token_len_per_gpu == "auto"
    assert found.actor.token_budget == 4096
    with pytest.raises(Exception, match="ppo_max_token_len_per_gpu"):
        load(None, ["model.path=m", "actor.ppo_max_token_len_per_gpu=some"])


def test_what_was_chosen_is_kept_and_read_again(tiny_lm: str, tmp_path: Path) -> None:
    actor, rows, console = load_actor(tiny_lm), random_trajectories(6), Console(quiet=True)
    before = {name: p.clone() for name, p in actor.model.named_parameters()}
    chosen = with_budget(recipe(actor=AUTO), console, actor, rows, tmp_path).actor.ppo_max_token_len_per_gpu
    assert chosen in train_budget.BUDGETS
    assert json.loads((tmp_path / FILE).read_text())["tokens"] == chosen
    for name, parameter in actor.model.named_parameters():
        assert parameter.grad is None
        assert parameter.equal(before[name])
    (tmp_path / FILE).write_text(json.dumps({"tokens": 77}))
    again = with_budget(recipe(actor=AUTO), console, actor, rows, tmp_path)
    assert again.actor.ppo_max_token_len_per_gpu == 77
    given = recipe()
    assert with_budget(given, console, actor, rows, tmp_path) is given


def test_timing_ends_in_time(tiny_lm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_budget, "ENOUGH", 0.0)
    assert list(time_budgets(load_actor(tiny_lm), random_trajectories(3))) == [512]


def test_a_budget_that_memory_cannot_hold_ends_the_timing(
    tiny_lm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor, whole = load_actor(tiny_lm), train_budget._pass

    def within(actor: Actor, rows: Sequence[Trajectory], budget: int) -> None:
        if budget == 2048 or short:
            raise MemoryError
        whole(actor, rows, budget)

    monkeypatch.setattr(train_budget, "_pass", within)
    short = False
    assert list(time_budgets(actor, random_trajectories(3))) == [512, 1024]
    assert all(parameter.grad is None for parameter in actor.model.parameters())
    short = True
    with pytest.raises(MemoryError):
        time_budgets(actor, random_trajectories(3))


def test_the_largest_budget_is_timed_with_as_many_tokens(
    tiny_lm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(train_budget, "_pass", lambda _, rows, budget: seen.append(len(rows)))
    row = random_trajectories(1)[0]
    fits = max(train_budget.BUDGETS) // (len(row.prompt_ids) + len(row.response_ids))
    time_budgets(load_actor(tiny_lm), [row] * (fits + 5))
    assert seen == [1, *[fits] * len(train_budget.BUDGETS)]
