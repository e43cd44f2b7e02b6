"""The token budget `auto` is chosen once from timings and kept; nothing else of a run hangs on it."""

import json
from pathlib import Path

import pytest
from rows_made import random_trajectories
from training_made import recipe

from rein.config.load import load
from rein.models.actor import load_actor
from rein.stages import train_budget
from rein.stages.train_budget import FILE, quickest, time_budgets, with_budget
from rein.tracking.console import Console

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
