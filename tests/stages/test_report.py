"""The report stage on run folders that hold more or less."""

import json
from pathlib import Path

import pytest

from rein.config.recipe import Recipe
from rein.data.parquet import write_rows
from rein.errors import DataError
from rein.journal import Journal
from rein.stages import report
from rein.stages.evaluate import ANSWERS
from rein.tracking.console import Console


def write_metrics(folder: Path, metric: str) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"number": n, "time": 1.0, metric: 1.0 / n}) for n in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_an_empty_folder_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no stage has left results here; run `rein run`"):
        report.run(Recipe(out=str(tmp_path)), Console(quiet=True))
    assert not (tmp_path / "report.html").exists()


def test_one_stage_is_enough(tmp_path: Path) -> None:
    write_metrics(tmp_path / "sft", "train/loss")
    report.run(Recipe(out=str(tmp_path)), Console(quiet=True))
    page = (tmp_path / "report.html").read_text()
    assert "Fine-tuning" in page
    assert "Not evaluated" in page


def test_curves_answers_and_outcome_meet_on_the_page(tmp_path: Path) -> None:
    write_metrics(tmp_path / "train", "probe/kl_reference")
    folder = tmp_path / "evaluate"
    folder.mkdir()
    numbers = {
        "accuracy": 0.5,
        "n": 2,
        "score": 0.5,
        "response_length": 3.0,
        "repetition": 0.0,
        "truncated": 0.0,
    }
    outcome = {"before": numbers, "after": numbers, "lift": 0.0, "lift_ci95": [-0.5, 0.5], "n": 2}
    (folder / "evaluation.json").write_text(json.dumps(outcome | {"by_data_source": {}}))
    row = {
        "where": "test.parquet row 0",
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "how <b>much</b>?"}],
        "ground_truth": 5,
        "before": "4",
        "after": "5",
        "before_score": 0.0,
        "after_score": 1.0,
    }
    write_rows(folder / "answers.parquet", [row], ANSWERS)
    report.run(Recipe(out=str(tmp_path), seed=7), Console(quiet=True))
    page = (tmp_path / "report.html").read_text()
    assert "No proven change" in page
    assert "how &lt;b&gt;much&lt;/b&gt;?" in page
    assert "probe/kl_reference" in page
    assert "<code>seed</code>" in page


def page_of(out: Path) -> str:
    report.run(Recipe(out=str(out)), Console(quiet=True))
    return (out / "report.html").read_text()


def test_a_run_without_a_journal_is_one_in_which_no_guard_fired(tmp_path: Path) -> None:
    write_metrics(tmp_path / "train", "probe/kl_reference")
    assert "No guard fired." in page_of(tmp_path)


def test_without_training_nothing_is_said_of_guards(tmp_path: Path) -> None:
    write_metrics(tmp_path / "sft", "train/loss")
    assert 'id="guards"' not in page_of(tmp_path)


def test_events_that_a_resumed_run_went_through_again_are_not_on_the_page(tmp_path: Path) -> None:
    write_metrics(tmp_path / "train", "probe/kl_reference")
    journal = Journal(tmp_path / "train" / "journal.jsonl")
    told = {"action": "alert", "metric": "val/score", "value": 0.1, "limit": 0.2, "changed": {}}
    journal.append("verdict", number=1, rule="stands", reason="val/score 0.1 is <b>low</b>", **told)
    journal.append("verdict", number=9, rule="undone", reason="val/score 0.1 is low", **told)
    journal.resumed(keeps=1, number=4)
    page = page_of(tmp_path)
    assert "1 alert." in page
    assert "val/score 0.1 is &lt;b&gt;low&lt;/b&gt;" in page
    assert "undone</td>" not in page
