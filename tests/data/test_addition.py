"""Claims about the demo's made data."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rein.data import addition
from rein.data.parquet import read_rows

NUMBER = st.integers(100, 999)


@pytest.mark.parametrize(
    ("a", "b", "answer"),
    [
        (347, 258, "7+8+0=15;4+5+1=10;3+2+1=6#605"),
        (111, 222, "1+2+0=3;1+2+0=3;1+2+0=3#333"),
        (999, 999, "9+9+0=18;9+9+1=19;9+9+1=19#1998"),
        (500, 500, "0+0+0=0;0+0+0=0;5+5+0=10#1000"),
    ],
)
def test_the_right_answer_is_written_out_from_the_units(a: int, b: int, answer: str) -> None:
    assert addition.correct(a, b) == answer


@given(a=NUMBER, b=NUMBER)
def test_the_right_answer_ends_in_the_sum(a: int, b: int) -> None:
    assert addition.correct(a, b).partition("#")[2] == str(a + b)


@given(a=NUMBER, b=NUMBER, seed=st.integers(0, 50))
def test_every_step_of_a_demonstration_adds_up_and_a_carry_is_only_ever_forgotten(
    a: int, b: int, seed: int
) -> None:
    answer = addition.demonstration(a, b, np.random.default_rng(seed), p_hard=0.5, p_easy=0.5)
    steps, _, number = answer.partition("#")
    worked = [tuple(int(n) for n in re.split(r"[+=]", step)) for step in steps.split(";")]
    assert [(x, y) for x, y, _, _ in worked] == [(a // 10**i % 10, b // 10**i % 10) for i in range(3)]
    assert worked[0][2] == 0
    for x, y, carry, total in worked:
        assert x + y + carry == total
    for (*_, before), (_, _, carry, _) in itertools.pairwise(worked):
        assert carry in (0, int(before >= 10))
    assert number == f"{worked[2][3]}{worked[1][3] % 10}{worked[0][3] % 10}"


def test_carries_are_forgotten_at_the_stated_rates() -> None:
    rng = np.random.default_rng(0)
    for a, b, rate in ((105, 106, addition.P_HARD), (109, 109, addition.P_EASY)):
        forgot = sum(addition.demonstration(a, b, rng) != addition.correct(a, b) for _ in range(4000))
        assert abs(forgot / 4000 - rate) < 0.025  # 3 standard errors


def test_problems_are_different_and_keep_away_from_those_excluded() -> None:
    first = addition.problems(3000, seed=1)
    second = addition.problems(3000, seed=2, exclude=set(first))
    unordered = {frozenset(problem) for problem in first + second}
    assert len(unordered) == 6000
    assert all(100 <= number <= 999 for problem in first for number in problem)
    assert addition.problems(3000, seed=1) == first


def asked(path: Path) -> set[frozenset[str]]:
    def text(row: dict) -> str:  # type: ignore[type-arg]
        return row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][0]["content"]

    return {frozenset(text(row).removesuffix("=").split("+")) for _, row in read_rows(path)}


def test_the_files_have_the_stated_rows_and_share_no_problem(tmp_path: Path) -> None:
    wrote = addition.write(tmp_path, seed=0)
    assert wrote == {
        "test.parquet": 500,
        "dev.parquet": 200,
        "prompts.parquet": 480,
        "demonstrations.parquet": 6000,
        "pairs.parquet": 3000,
    }
    problems = {name: asked(tmp_path / name) for name in wrote}
    assert {name: len(found) for name, found in problems.items()} == wrote
    for one, other in itertools.combinations(problems, 2):
        if {one, other} != {"demonstrations.parquet", "pairs.parquet"}:
            assert not problems[one] & problems[other], (one, other)


def test_seeds_share_their_test_and_nothing_else_and_repeat_exactly(tmp_path: Path) -> None:
    small = {"demonstrations": 50, "prompts": 20, "dev": 10, "pairs": 30}
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        addition.write(tmp_path / name, seed, **small)
    for file in (tmp_path / "a").iterdir():
        bytes_of = [(tmp_path / name / file.name).read_bytes() for name in "abc"]
        assert bytes_of[0] == bytes_of[1]
        assert (bytes_of[0] == bytes_of[2]) == (file.name == "test.parquet")


def test_a_rejected_answer_forgets_a_carry_and_the_chosen_one_does_not(tmp_path: Path) -> None:
    addition.write(tmp_path, seed=3, demonstrations=5, pairs=200)
    for _, row in read_rows(tmp_path / "pairs.parquet"):
        a, b = (int(n) for n in row["prompt"].removesuffix("=").split("+"))
        assert row["chosen"] == addition.correct(a, b)
        assert row["rejected"] != row["chosen"]
        assert row["rejected"].partition("#")[2] != str(a + b) == row["reward_model"]["ground_truth"]


def test_prompts_lie_in_verls_layout(tmp_path: Path) -> None:
    addition.write(tmp_path, seed=0, demonstrations=5, pairs=5)
    _, row = next(iter(read_rows(tmp_path / "prompts.parquet")))
    text = row["prompt"][0]["content"]
    assert re.fullmatch(r"\d{3}\+\d{3}=", text)
    assert row == {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "addition",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(int(n) for n in text[:-1].split("+")))},
        "extra_info": {"split": "prompts", "index": 0},
    }
