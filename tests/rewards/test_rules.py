"""Format and length rewards."""

from collections.abc import Callable
from typing import Any

import pytest

from rein.config.recipe import RewardSpec
from rein.data.tokenize import Encoder
from rein.errors import ConfigError
from rein.models.tiny import tiny_tokenizer
from rein.rewards import build
from rein.types import Trajectory


def score(name: str, row: Trajectory, **options: Any) -> float | None:
    return build([RewardSpec(name=name, options=options)], scorer=None)([row])[0]


def test_full_matches_the_whole_response_and_search_any_part(row: Callable[..., Trajectory]) -> None:
    tags = r"<answer>\d+</answer>"
    assert score("format", row("<answer>4</answer>\n"), pattern=tags) == 1.0
    assert score("format", row("well, <answer>4</answer>"), pattern=tags) == 0.0
    assert score("format", row("well, <answer>4</answer>"), pattern=tags, match="search") == 1.0


def test_a_pattern_that_ends_in_dollar_holds_on_text_without_stop_tokens(
    row: Callable[..., Trajectory],
) -> None:
    assert score("format", row("<answer>4</answer>"), pattern=r"</answer>$", match="search") == 1.0


def test_a_dot_matches_newlines(row: Callable[..., Trajectory]) -> None:
    assert score("format", row("<think>a\nb</think>4"), pattern="<think>.*</think>.+") == 1.0


def test_a_broken_pattern_stops_at_the_start() -> None:
    with pytest.raises(ConfigError, match="reward format: pattern '\\(' is no regular expression"):
        build([RewardSpec(name="format", options={"pattern": "("})], scorer=None)


@pytest.mark.parametrize(("tokens", "expected"), [(1, 0.0), (8, 0.0), (9, -0.5), (12, -2.0), (100, -3.0)])
def test_each_token_over_the_target_costs_the_slope(
    tokens: int, expected: float, row: Callable[..., Trajectory]
) -> None:
    assert score("length", row("", tokens=tokens), target=8, slope=-0.5, lowest=-3) == expected


def test_without_a_target_the_length_reward_is_linear(row: Callable[..., Trajectory]) -> None:
    assert score("length", row("", tokens=10), slope=0.25, offset=-1) == 1.5
    assert score("length", row("", tokens=10), slope=0.25, offset=-1, highest=1) == 1.0


@pytest.mark.parametrize("special", [False, True])
def test_scored_text_ends_at_the_first_stop_token(special: bool, row: Callable[..., Trajectory]) -> None:
    tokenizer = tiny_tokenizer("<answer>/4\n")
    if special:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    encoder = Encoder(tokenizer, apply_chat_template=False, stop_ids={tokenizer.eos_token_id})
    tags = tokenizer.encode("<answer>4</answer>", add_special_tokens=False)
    assert len(tags) == (3 if special else 18)
    stored = [*tags, tokenizer.eos_token_id, tokenizer.pad_token_id, *tags, tokenizer.pad_token_id]
    text = encoder.decode_response(stored, keep_special=special)
    assert text == "<answer>4</answer>"
    assert score("format", row(text), pattern=r"<answer>\d+</answer>$", match="search") == 1.0
