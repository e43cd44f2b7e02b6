"""The evaluate stage and the validator: two tiny models on made prompts, numbers recounted."""

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rein.config.recipe import Recipe
from rein.errors import DataError, ReinError, UserCodeError
from rein.stages import evaluate
from rein.tracking.console import Console
from rein.types import Completion, Ids, Prompt, Trajectory
from rein.validator import Validator

USER = """
def parity(data_source, solution_str, ground_truth, extra_info):
    "Right where the answer's characters and the truth are both even or both odd."
    return None if ground_truth is None else float(len(solution_str) % 2 == int(ground_truth) % 2)

def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str)
"""


@pytest.fixture
def recipe(
    tiny: Path, other_tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Recipe]:
    (tmp_path / "parity_rewards.py").write_text(USER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "parity_rewards", raising=False)

    def make(prompts: Sequence[dict[str, Any]], reward: str = "parity_rewards:parity", **keys: Any) -> Recipe:
        file = tmp_path / "test.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        return Recipe.model_validate(
            {
                "out": str(tmp_path / "out"),
                "model": {"path": str(tiny)},
                "data": {"max_response_length": 12, "max_bad_fraction": 0.5},
                "evaluate": {
                    "files": str(file),
                    "reward": reward,
                    "before": str(tiny),
                    "after": str(other_tiny),
                    "pass_k": 4,
                    **keys,
                },
            }
        )

    return make


def prompts(n: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}+{i + 1}=", "reward_model": {"ground_truth": i}, "data_source": "ab"[i % 3 == 0]}
        for i in range(n)
    ]


def test_the_numbers_are_those_of_the_answers(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    facts = evaluate.run(recipe(prompts(24)), Console(quiet=True))
    folder = tmp_path / "out" / "evaluate"
    evaluation = json.loads((folder / "evaluation.json").read_text())
    answers = pq.read_table(folder / "answers.parquet").to_pylist()
    assert len(answers) == 24
    for row in answers:
        for side in ("before", "after"):
            assert row[f"{side}_score"] == float(len(row[side]) % 2 == row["ground_truth"] % 2)
    means = {side: np.mean([row[f"{side}_score"] for row in answers]) for side in ("before", "after")}
    for side, mean in means.items():
        assert evaluation[side]["accuracy"] == pytest.approx(mean)
        assert evaluation[side]["n"] == 24
        assert evaluation[side]["response_length"] == pytest.approx(
            np.mean([len(r[f"{side}_ids"]) for r in answers])
        )
        assert (
            0 <= evaluation[side]["pass@1"] <= evaluation[side]["pass@2"] <= evaluation[side]["pass@4"] <= 1
        )
    assert evaluation["lift"] == pytest.approx(means["after"] - means["before"])
    low, high = evaluation["lift_ci95"]
    assert low <= evaluation["lift"] <= high
    by_source = evaluation["by_data_source"]
    assert {name: part["n"] for name, part in by_source.items()} == {"a": 16, "b": 8}
    a = [row for row in answers if row["data_source"] == "a"]
    assert by_source["a"]["lift"] == pytest.approx(np.mean([r["after_score"] - r["before_score"] for r in a]))
    assert facts["rows"] == {"in": 24, "rejected": 0, "judged": 24}


def test_the_same_seed_gives_the_same_evaluation(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    files = []
    for _ in range(2):
        evaluate.run(recipe(prompts(6)), Console(quiet=True))
        files.append((tmp_path / "out" / "evaluate" / "evaluation.json").read_bytes())
    assert files[0] == files[1]


def test_prompts_that_cannot_be_judged_are_named_not_dropped(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    rows = prompts(6)
    rows[2]["reward_model"] = {"ground_truth": None}
    rows[4]["prompt"] = None
    facts = evaluate.run(recipe(rows, pass_k=0), Console(quiet=True))
    assert facts["rows"] == {"in": 6, "rejected": 2, "judged": 4}
    rejects = [
        json.loads(x) for x in (tmp_path / "out" / "evaluate" / "rejects.jsonl").read_text().splitlines()
    ]
    assert {row["reason"] for row in rejects} == {
        "prompt is missing",
        "parity_rewards:parity cannot judge it",
    }
    with pytest.raises(DataError, match="none of 6 prompts can be judged"):
        evaluate.run(recipe([row | {"reward_model": {}} for row in prompts(6)]), Console(quiet=True))


def test_scores_that_are_not_right_or_wrong_are_no_accuracy(recipe: Callable[..., Recipe]) -> None:
    facts = evaluate.run(recipe(prompts(6), "parity_rewards:length", pass_k=0), Console(quiet=True))
    assert facts["before"]["accuracy"] is None
    assert facts["before"]["score"] > 1
    assert not any(key.startswith("pass@") for key in facts["before"])


def test_a_wrong_reward_stops_before_a_model_is_loaded(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(ReinError, match="did you mean parity"):
        evaluate.run(
            recipe(prompts(6), "parity_rewards:parit", before=str(tmp_path / "none")), Console(quiet=True)
        )
    with pytest.raises(UserCodeError, match=r"ValueError.*test\.jsonl"):
        evaluate.run(recipe([{"prompt": "1+", "reward_model": {"ground_truth": "x"}}]), Console(quiet=True))


class Scripted:
    """An engine that answers each prompt with the ids it is told."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers = answers

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
        seed: int,
        advance: Callable[[int], None] | None = None,
    ) -> list[list[Completion]]:
        assert (n, temperature) == (1, 0.0)
        found = []
        for answer in self.answers:
            ids = np.array(answer[:max_new_tokens], dtype=np.int64)
            reason = "length" if len(answer) > max_new_tokens else "stop"
            found.append([Completion(ids, np.zeros(len(ids), dtype=np.float32), reason)])
        return found


def decode(ids: Ids) -> str:
    return " ".join(str(i) for i in ids if i != 1)


def first_is_truth(rows: Sequence[Trajectory]) -> list[float | None]:
    return [None if r.ground_truth is None else float(r.response.startswith(r.ground_truth)) for r in rows]


def always(rows: Sequence[Trajectory]) -> list[float | None]:
    return [1.0 for _ in rows]


def test_the_validator_reports_what_the_answers_look_like() -> None:
    ids = np.array([5])
    given = [Prompt("a", "q", ids, "5"), Prompt("b", "q", ids, "5"), Prompt("c", "q", ids, None)]
    engine = Scripted([[5, 1], [6, 6, 6, 6, 6, 6, 6, 6], [7, 1]])
    validator = Validator(engine, first_is_truth, always, given, decode=decode, max_new_tokens=7)
    metrics = validator.measure()
    assert metrics == pytest.approx(
        {
            "val/score": 0.5,
            "val/proxy_score": 1.0,
            "val/unscored": 1.0,
            "val/response_length": (2 + 7 + 2) / 3,
            "val/repetition": 0.75 / 3,
            "val/truncated": 1 / 3,
        }
    )
    assert [row.response for row in validator.answers] == ["5", "6 6 6 6 6 6 6", "7"]
    assert [row.score for row in validator.answers] == [1.0, 0.0, None]


def test_without_truths_there_is_no_held_out_score() -> None:
    validator = Validator(
        Scripted([[5, 1]]),
        first_is_truth,
        None,
        [Prompt("a", "q", np.array([5]))],
        decode=decode,
        max_new_tokens=4,
    )
    assert "val/score" not in validator.measure()
    assert Validator(Scripted([]), first_is_truth, None, [], decode=decode, max_new_tokens=4).measure() == {}


# Win rate, length, seeds, the proxy


def test_the_win_rate_and_the_quarters_by_length_are_recounted_from_the_answers(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    facts = evaluate.run(recipe(prompts(24), pass_k=0), Console(quiet=True))
    answers = pq.read_table(tmp_path / "out" / "evaluate" / "answers.parquet").to_pylist()
    wins = [
        1.0 if r["after_score"] > r["before_score"] else 0.5 * (r["after_score"] == r["before_score"])
        for r in answers
    ]
    assert facts["win_rate"] == pytest.approx(np.mean(wins))
    assert facts["win_rate_ci95"][0] <= facts["win_rate"] <= facts["win_rate_ci95"][1]
    assert sum(part["n"] for part in facts["by_length"]) == 24
    for part in facts["by_length"]:
        low, high = part["tokens"]
        rows = [r for r in answers if low <= len(r["before_ids"]) <= high]
        assert len(rows) == part["n"]
        assert part["lift"] == pytest.approx(np.mean([r["after_score"] - r["before_score"] for r in rows]))
    ends = [part["tokens"] for part in facts["by_length"]]
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ends))


def test_several_seeds_are_several_draws_and_the_first_is_the_one_seed_s(
    recipe: Callable[..., Recipe],
) -> None:
    one = evaluate.run(recipe(prompts(8), seeds=1), Console(quiet=True))
    three = evaluate.run(recipe(prompts(8), seeds=3), Console(quiet=True))
    assert one["sampled"]["by_seed"] == three["sampled"]["by_seed"][:1]
    lifts = [part["lift"] for part in three["sampled"]["by_seed"]]
    assert len(lifts) == 3
    assert len(set(lifts)) > 1
    assert three["sampled"]["lift"] == pytest.approx(np.mean(lifts))
    assert three["sampled"]["lift_std_over_seeds"] == pytest.approx(np.std(lifts, ddof=1))
    assert one["sampled"]["lift_std_over_seeds"] is None
    assert one["lift"] == three["lift"]  # greedy answers have no seed
    assert list(three["before"]) == list(one["before"])  # pass@k up to pass_k, of more samples
    assert three["before"]["pass@1"] == pytest.approx(three["sampled"]["before"])


def test_the_proxy_is_scored_beside_the_truth(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    made = recipe(prompts(12), pass_k=0)
    assert "proxy" not in evaluate.run(made, Console(quiet=True))  # nothing was trained on
    told = {"score": {"reward": [{"name": "parity_rewards:length"}]}}
    facts = evaluate.run(Recipe.model_validate(made.model_dump() | told), Console(quiet=True))
    answers = pq.read_table(tmp_path / "out" / "evaluate" / "answers.parquet").to_pylist()
    gained = [len(r["after"]) - len(r["before"]) for r in answers]
    assert facts["proxy"]["lift"] == pytest.approx(np.mean(gained))
    assert facts["proxy"]["win_rate"] == pytest.approx(np.mean([(g > 0) + 0.5 * (g == 0) for g in gained]))
    assert facts["proxy"]["reward"] == ["parity_rewards:length"]


def test_a_well_formed_answer_ends_by_itself_and_matches_the_pattern(
    recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    for pattern in (None, "[0-9]"):
        facts = evaluate.run(recipe(prompts(24), pass_k=0, pattern=pattern), Console(quiet=True))
        answers = pq.read_table(tmp_path / "out" / "evaluate" / "answers.parquet").to_pylist()
        for side in ("before", "after"):
            good = [
                r[f"{side}_finish_reason"] == "stop"
                and r[side].strip() != ""
                and (pattern is None or re.search(pattern, r[side]))
                for r in answers
            ]
            assert facts[side]["well_formed"] == np.mean(good)
