"""The table, the mix, the noise, the reward model and the user's function."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rein.config.recipe import RewardSpec
from rein.errors import ConfigError, EngineError, UserCodeError
from rein.rewards import REWARDS, build, part_metrics, uses_model
from rein.types import TokenRow, Trajectory

OPTIONS: dict[str, dict[str, Any]] = {"format": {"pattern": "x"}, "noisy": {"of": "gsm8k"}}

USER = """
import numpy as np

def verl_style(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "acc": True}

def numpy_number(data_source, solution_str, ground_truth, extra_info, scale=1):
    return np.float32(scale)

def raises(data_source, solution_str, ground_truth, extra_info):
    return 1 / 0

def nan(**columns):
    return float("nan")

def text(**columns):
    return "0.5"

def nothing(**columns):
    return None

def no_score(**columns):
    return {"acc": 1}

def array(**columns):
    return np.zeros(3)

def array_in_a_dict(**columns):
    return {"score": np.zeros(2)}

def too_large(**columns):
    return 10 ** 400

def wrong_arguments(prompt, response):
    return 1.0
"""


class LengthScorer:
    """Scores a row by its response's length, and counts the batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def scores(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        self.batches.append(len(rows))
        return torch.tensor([float(len(row.response_ids)) for row in rows])


class NanScorer:
    def scores(self, rows: Sequence[TokenRow]) -> torch.Tensor:
        return torch.full((len(rows),), float("nan"))


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    (tmp_path / "my_rewards.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "my_rewards", raising=False)
    return lambda name, **options: build(
        [RewardSpec(name=f"my_rewards:{name}", options=options)], scorer=None
    )


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_of_the_table_scores_each_row_or_says_none(
    name: str, row: Callable[..., Trajectory]
) -> None:
    reward = build([RewardSpec(name=name, options=OPTIONS.get(name, {}))], scorer=LengthScorer())
    rows = [row("#### 4", "4"), row("#### 5", "4"), row("#### 4", None), row("", "4")]
    scores = reward(rows)
    assert len(scores) == 4
    assert all(score is None or isinstance(score, float) for score in scores)
    assert reward(rows) == scores
    assert reward([]) == []


def test_an_unknown_name_or_option_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'gsm8' is unknown; did you mean gsm8k"):
        build([RewardSpec(name="gsm8")], scorer=None)
    with pytest.raises(ConfigError, match="option 'markr' is unknown; did you mean marker"):
        build([RewardSpec(name="exact", options={"markr": "#"})], scorer=None)
    with pytest.raises(ConfigError, match="option 'pattern' is missing"):
        build([RewardSpec(name="format")], scorer=None)
    with pytest.raises(ConfigError, match=r"options\.of is missing"):
        build([RewardSpec(name="noisy")], scorer=None)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("format", {"pattern": 5}, "option pattern=5: Input should be a valid string; correct it"),
        ("format", {"pattern": "x", "ignore_case": 1}, "option ignore_case=1"),
        ("length", {"target": "a"}, "option target='a': Input should be a valid integer"),
        ("length", {"target": True}, "option target=True"),
        ("length", {"slope": None}, "option slope=None: Input should be a valid number"),
        ("length", {"slope": float("inf")}, "option slope=inf: Input should be a finite number"),
        ("exact", {"marker": 5}, "option marker=5"),
        ("math", {"seconds": -1}, "seconds=-1; give a number above 0"),
        ("model", {"max_tokens": "a"}, "option max_tokens='a'"),
        ("noisy", {"of": 5}, "option of=5"),
        ("noisy", {"of": "exact", "options": 3}, "option options=3"),
        ("noisy", {"of": "exact", "accept_wrong": "a"}, "option accept_wrong='a'"),
        ("noisy", {"of": "exact", "options": {"marker": 5}}, "reward exact: option marker=5"),
        ("noisy", {"of": "exact", "inner": "a"}, "option 'inner' is unknown"),
        ("", {}, "'' is unknown; known: gsm8k"),
        (":f", {}, "cannot import ''"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused_before_any_row(
    name: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        build([RewardSpec(name=name, options=options)], scorer=LengthScorer())
    assert said in str(caught.value)
    assert "; " in str(caught.value)


def test_a_whole_number_is_a_number() -> None:
    build([RewardSpec(name="length", options={"slope": -1, "lowest": 0, "highest": None})], scorer=None)


def test_the_mix_is_the_weighted_sum_and_none_wins(row: Callable[..., Trajectory]) -> None:
    specs = [
        RewardSpec(name="gsm8k", weight=2.0),
        RewardSpec(name="format", weight=0.5, options={"pattern": "####", "match": "search"}),
        RewardSpec(name="format", weight=-1.0, options={"pattern": "never"}),
    ]
    mix = build(specs, scorer=None)
    rows = [row("#### 4", "4"), row("#### 5", "4"), row("5", "4"), row("#### 4", None)]
    assert mix(rows) == [2.5, 0.5, 0.0, None]
    parts = mix.by_part(rows)
    assert list(parts) == ["gsm8k", "format", "format#2"]
    metrics = part_metrics(parts)
    assert metrics["score/gsm8k/mean"] == pytest.approx(1 / 3)
    assert metrics["score/gsm8k/unscored"] == 1
    assert metrics["score/format/mean"] == 0.75


def test_the_reward_model_reads_as_many_rows_as_fit(row: Callable[..., Trajectory]) -> None:
    scorer = LengthScorer()
    specs = [RewardSpec(name="model", options={"max_tokens": 8})]
    assert build(specs, scorer=scorer)([row("", tokens=n) for n in (0, 4, 1, 20, 4, 0)]) == [
        0,
        4,
        1,
        20,
        4,
        0,
    ]
    assert scorer.batches == [2, 1, 1, 2]  # two prompt tokens each; the long row goes alone
    assert uses_model(specs)
    assert uses_model([RewardSpec(name="noisy", options={"of": "model"})])
    assert not uses_model([RewardSpec(name="noisy", options={"of": "gsm8k"})])
    with pytest.raises(ConfigError, match="no reward model"):
        build(specs, scorer=None)


def test_a_reward_model_that_says_nan_stops_the_stage(row: Callable[..., Trajectory]) -> None:
    with pytest.raises(EngineError, match=r"made\.parquet row 7: the reward model scores it nan"):
        build([RewardSpec(name="model")], scorer=NanScorer())([row("")])


def test_noise_accepts_a_fixed_share_of_wrong_answers_only(row: Callable[..., Trajectory]) -> None:
    def noisy(seed: int, share: float = 0.4) -> Sequence[float | None]:
        options = {"of": "exact", "options": {"marker": "#"}, "accept_wrong": share, "seed": seed}
        return build([RewardSpec(name="noisy", options=options)], scorer=None)(rows)

    rows = [row(f"#{n}", 0, prompt=f"p{n % 7}") for n in range(1, 2001)]
    accepted = noisy(0)
    assert sum(score == 1.0 for score in accepted) / 2000 == pytest.approx(0.4, abs=0.035)
    assert noisy(0) == accepted
    assert noisy(1) != accepted
    assert noisy(0, 0.0) == [0.0] * 2000
    assert noisy(0, 1.0) == [1.0] * 2000
    rows = [row("#0", 0), row("#0", None)]
    assert noisy(0) == [1.0, None]


def test_noise_depends_on_prompt_and_response_and_not_on_the_order(row: Callable[..., Trajectory]) -> None:
    reward = build([RewardSpec(name="noisy", options={"of": "gsm8k", "accept_wrong": 0.5})], scorer=None)
    rows = [row(f"#### {n}", 0, prompt=prompt) for prompt in "ab" for n in range(1, 65)]
    scores = reward(rows)
    assert list(reward(rows[::-1])) == list(scores)[::-1]
    assert scores[:64] != scores[64:]


def test_a_verl_compute_score_works_as_it_is(
    user: Callable[..., Any], row: Callable[..., Trajectory]
) -> None:
    assert user("verl_style")([row("4", "4"), row("5", "4")]) == [1.0, 0.0]
    assert user("numpy_number", scale=0.5)([row("4")]) == [0.5]
    assert user("nothing")([row("4")]) == [None]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "raises",
            "reward my_rewards:raises: raised ZeroDivisionError (division by zero) for made.parquet row 7",
        ),
        ("nan", "returned nan for made.parquet row 7"),
        ("text", "returned '0.5' for made.parquet row 7"),
        ("no_score", 'returned a dict without "score" for made.parquet row 7'),
        ("array", "returned a ndarray that is no number (only 0-dimensional"),
        ("array_in_a_dict", "returned a ndarray that is no number"),
        ("too_large", "returned a int that is no number (int too large to convert to float)"),
    ],
)
def test_a_user_function_that_fails_is_named_with_its_row(
    name: str, says: str, user: Callable[..., Any], row: Callable[..., Trajectory]
) -> None:
    with pytest.raises(UserCodeError) as caught:
        user(name)([row("4")])
    assert says in str(caught.value)
    assert caught.value.exit_code == 8


def test_a_user_function_with_other_arguments_is_refused_before_any_row(user: Callable[..., Any]) -> None:
    with pytest.raises(
        ConfigError, match="it is called with data_source, solution_str, ground_truth, extra_info"
    ):
        user("wrong_arguments")
    with pytest.raises(ConfigError, match="scale"):
        user("verl_style", scale=2)
