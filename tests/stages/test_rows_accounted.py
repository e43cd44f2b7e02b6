"""Rows in = rows used + rows rejected, for every stage: printed, in manifest.json, named in rejects.jsonl."""

import json
from pathlib import Path
from typing import Any

import pytest

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.data.rejects import TooManyBad
from rein.stages import pipeline
from rein.tracking.console import Console

GOOD = 20
BESIDE = ("in", "trajectories")  # counts that are no part of the sum


class Said(Console):
    """A console that keeps what is said."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def row(i: int, **changed: Any) -> dict[str, Any]:
    """A row that every stage can read."""
    answer = {"response": f"#{i}", "chosen": f"#{i}", "rejected": "#"}
    scored = {"score": float(i % 2), "reward_model": {"ground_truth": str(i)}, "temperature": 1.0}
    return {"prompt": f"{i // 2}+1=", **answer, **scored, **changed}


BAD = [
    row(90, prompt=None),
    row(91, prompt="1" * 30),
    row(92, response="", chosen="#92", rejected="#92"),
    row(93, response=7, chosen=7),
    row(94, response="1" * 40, chosen="1" * 40),
]
RAW = ["{", "7"]


@pytest.fixture
def recipe(tiny_lm: str, tmp_path: Path) -> Any:
    def make(*words: str, drop: tuple[str, ...] = ()) -> Recipe:
        rows = [row(i) for i in range(GOOD)] + BAD
        lines = [json.dumps({k: v for k, v in each.items() if k not in drop}) for each in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines, *RAW]))
        base = f"""
            model.path={tiny_lm} out={tmp_path}/run threads=1 data.train_files={tmp_path}/rows.jsonl
            data.max_bad_fraction=0.5 data.max_prompt_length=8 data.max_response_length=8
            data.train_batch_size=4 actor.ppo_mini_batch_size=4 actor.ppo_epochs=1
            trainer.critic_warmup=0 trainer.total_training_steps=1
            sft.batch_size=4 sft.total_steps=1 reward.batch_size=4 evaluate.pass_k=0 evaluate.before={tiny_lm}
            evaluate.after={tiny_lm} evaluate.files={tmp_path}/rows.jsonl
        """.split()
        own = ['score.reward={name: exact, options: {marker: "#"}}']
        return load(None, list({word.partition("=")[0]: word for word in (*base, *own, *words)}.values()))[0]

    return make


PAIR = ("chosen", "rejected")
CASES = [
    ("sft", (), PAIR, 7),
    ("sft", ("data.drop_duplicates=true", "sft.response_key=chosen"), (), 6),
    ("reward", (), (), 7),
    ("reward", ("data.holdout_fraction=0.3",), (), 7),
    ("rollout", (), (), 4),
    ("rollout", ("rollout.max_prompts=3", "rollout.n=2"), (), 4),
    ("rollout", ("data.truncation=left",), (), 3),
    ("rollout", ("data.drop_duplicates=true",), (), 14 + 1),
    ("score", (), PAIR, 7),
    ("train", (), PAIR, 7),
    ("train", ("data.holdout_fraction=0", "algorithm.filter_threshold=0.5"), PAIR, 7),
    ("train", ("algorithm.method=grpo", "algorithm.filter_groups.enable=true"), PAIR, 7),
    ("train", ("algorithm.method=dpo",), (), 14),
    ("train", ("data.keep_groups=true",), PAIR, 7),
    ("evaluate", (), (), 4),
    ("evaluate", ("evaluate.max_prompts=5",), (), 4),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("stage", "words", "drop", "rejected"), CASES, ids=[f"{c[0]} {' '.join(c[1])}" for c in CASES]
)
def test_rows_in_are_rows_used_and_rows_rejected(
    stage: str, words: tuple[str, ...], drop: tuple[str, ...], rejected: int, recipe: Any, tmp_path: Path
) -> None:
    console = Said()
    pipeline.run_stage(stage, recipe(*words, drop=drop), console)
    folder = tmp_path / "run" / stage
    counts = json.loads((folder / "manifest.json").read_text())["rows"]
    assert counts["in"] == sum(count for name, count in counts.items() if name not in BESIDE), counts
    lines = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    assert len(lines) == counts["rejected"] == rejected, lines
    sides = 2 if stage == "train" and not drop else 1
    assert counts["in"] == sides * (GOOD + len(BAD) + len(RAW))
    assert all(line["file"] == "rows.jsonl" and line["reason"] and line["kind"] for line in lines)
    assert all(isinstance(line.get("row", line.get("line")), int) for line in lines)
    assert any(str(counts["in"]) in line and f"{rejected} rejected" in line for line in console.lines), (
        console.lines
    )


@pytest.mark.parametrize(
    ("stage", "drop"),
    [("sft", PAIR), ("reward", ()), ("rollout", ()), ("score", PAIR), ("train", PAIR), ("evaluate", ())],
)
def test_a_stage_that_too_many_bad_rows_stop_has_named_them_all(
    stage: str, drop: tuple[str, ...], recipe: Any, tmp_path: Path
) -> None:
    with pytest.raises(TooManyBad, match=r"raise data\.max_bad_fraction .* all are named in"):
        pipeline.run_stage(stage, recipe("data.max_bad_fraction=0.01", drop=drop), Said())
    lines = (tmp_path / "run" / stage / "rejects.jsonl").read_text().splitlines()
    assert len(lines) == (4 if stage in ("rollout", "evaluate") else 7)
    assert not (tmp_path / "run" / stage / "manifest.json").exists()


def test_validation_prompts_are_accounted_for_too(recipe: Any, tmp_path: Path) -> None:
    console = Said()
    words = [f"data.val_files={tmp_path}/rows.jsonl", "trainer.val_prompts=2"]
    pipeline.run_stage("train", recipe(*words, drop=PAIR), console)
    assert len((tmp_path / "run/train/validation_rejects.jsonl").read_text().splitlines()) == 4
    assert any("the first 2 of 23 prompts (trainer.val_prompts)" in line for line in console.lines)
