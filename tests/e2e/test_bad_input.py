"""Bad recipes and rows: one line on stderr that says where, what and what to do; nothing is half-written."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from e2e_run import Refuse, drafts, manifest, metrics, recipe, rein, weights, write_recipe

Row = dict[str, Any]
Body = dict[str, Any]
ROWS = "rows.parquet"


@pytest.fixture
def body(whole: Path, data: Path, tmp_path: Path) -> Body:
    """A sound recipe: train on the scored rows of the whole run."""
    made = recipe(whole / "sft" / "model", data, tmp_path / "run") | {"stages": ["train"]}
    made["data"]["train_files"] = str(whole / "score" / "trajectories.parquet")
    return made


@pytest.fixture(scope="module")
def rows(whole: Path) -> list[Row]:
    found: list[Row] = pq.read_table(whole / "score" / "trajectories.parquet").to_pylist()
    return found


def written(rows: list[Row], folder: Path, **changes: Callable[[int, Row], Any]) -> str:
    """The rows with some columns changed."""
    changed = [row | {name: change(i, row) for name, change in changes.items()} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(changed), folder / ROWS)
    return str(folder / ROWS)


def without(file: Path, column: str, renamed: str, target: Path) -> str:
    table = pq.read_table(file)
    pq.write_table(table.rename_columns([renamed if c == column else c for c in table.column_names]), target)
    return str(target)


def rejected(out: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (out / "train" / "rejects.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"learning_rate": 1e-6},
            "recipe.yaml line 44: learning_rate is unknown; did you mean actor.optim.lr?",
        ),
        ({"actor": {"lr": 1e-6}}, "actor.lr is unknown; did you mean actor.optim.lr?"),
        ({"trainer": {"ppo_epochs": 2}}, "trainer.ppo_epochs is unknown; did you mean actor.ppo_epochs?"),
        ({"actor": {"clip_raito": 0.1}}, "actor.clip_raito is unknown; did you mean actor.clip_ratio?"),
        ({"model": {"path": "./nomodel"}}, "path ./nomodel does not exist"),
        ({"model": {"path": "org/nomodel"}}, "model.path: org/nomodel is no folder"),
        (
            {"data": {"train_batch_size": 5000}},
            "5000 is larger than the 96 rows to train on (192 in, 0 rejected",
        ),
        ({"data": {"train_batch_size": "big"}}, 'data.train_batch_size="big": must be a whole number'),
        ({"actor": {"ppo_epochs": 1.5}}, "actor.ppo_epochs=1.5: must be a whole number"),
        (
            {"actor": {"optim": {"lr": "fast"}}},
            'actor.optim.lr="fast": must be a number, such as 0.1 or 1e-6',
        ),
        ({"actor": {"use_kl_loss": "maybe"}}, 'actor.use_kl_loss="maybe": must be true or false'),
        ({"data": {"train_files": 3}}, "data.train_files=3: must be a list"),
        ({"evaluate": {"reward": "exactly"}}, "did you mean exact?"),
    ],
)
def test_a_wrong_recipe_exits_2(
    keys: dict[str, Any],
    said: str,
    body: Body,
    refuse: Refuse,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for section, change in keys.items():
        body[section] = body.get(section, {}) | change if isinstance(change, dict) else change
    assert said in refuse(2, "train", body)


def test_a_rate_that_yaml_calls_text_is_a_number(body: Body, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    write_recipe(file, body)
    text = file.read_text().replace("lr: 1e-3", "lr: 1e-6")
    assert yaml.safe_load(text)["actor"]["optim"]["lr"] == "1e-6"  # PyYAML's, of YAML 1.1
    file.write_text(text)
    assert rein("train", file) == 0
    lines = metrics(tmp_path / "run")
    assert {line[name] for line in lines for name in ("actor/lr", "critic/lr") if name in line} == {1e-6}


def test_files_that_cannot_be_read_exit_3(body: Body, refuse: Refuse, whole: Path, tmp_path: Path) -> None:
    good = whole / "score" / "trajectories.parquet"
    raw = good.read_bytes()
    damaged = bytearray(raw)
    damaged[500:900] = b"\x7f" * 400
    made = tmp_path / "made.parquet"
    for content, said in (
        (None, "made.parquet: no such file or folder"),
        (b"", "made.parquet: the file is empty (0 bytes)"),
        (raw[: len(raw) // 2], "made.parquet: not a readable Parquet file"),
        (bytes(damaged), "made.parquet row 0: cannot be read"),
    ):
        if content is not None:
            made.write_bytes(content)
        body["data"]["train_files"] = str(made)
        assert said in refuse(3, "train", body)
    pq.write_table(pq.read_table(good).slice(0, 0), made)
    assert "made.parquet: no rows" in refuse(3, "train", body)
    without(good, "score", "reward", made)
    assert "no column `score`; did you mean `reward`?" in refuse(3, "train", body)
    pq.write_table(pq.read_table(good).drop_columns(["response_ids"]), made)
    without(made, "response", "respons", made)
    assert "no column `response`; did you mean `respons`?" in refuse(3, "train", body)


def test_prompts_over_the_limit_are_counted_and_named(
    body: Body, rows: list[Row], refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = written(rows, tmp_path, prompt_ids=lambda i, row: row["prompt_ids"] * (3 if i == 5 else 1))
    body["data"]["train_files"] = files
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    said = "rows.parquet row 5: the prompt has 24 tokens, data.max_prompt_length is 16"
    assert f"left out: 1 of 192 rows (1 prompt over the limit); first: {said}" in capsys.readouterr().out
    assert [f"{r['where']}: {r['reason']}" for r in rejected(tmp_path / "run")] == [said]
    assert manifest(tmp_path / "run", "train")["rows"]["rejected"] == 1
    body["out"] = str(tmp_path / "other")
    body["data"] |= {"truncation": "error"}
    assert said in refuse(3, "train", body)
    body["data"] |= {"truncation": "drop", "max_prompt_length": 7}
    assert "nothing is left: 192 of 192 rows" in refuse(3, "train", body)


def test_rows_without_tokens_or_scores_are_rejected_counted_and_named(
    body: Body, rows: list[Row], refuse: Refuse, tmp_path: Path
) -> None:
    columns = ("response_ids", "response_mask", "behavior_log_probs")
    empty = {name: lambda i, row, name=name: [] if i == 5 else row[name] for name in columns}
    files = written(rows, tmp_path, score=lambda i, row: math.nan if i == 7 else row["score"], **empty)
    body["data"] |= {"train_files": files, "max_bad_fraction": 0.02}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    reasons = [(r["where"], r["reason"]) for r in rejected(tmp_path / "run")]
    assert reasons == [
        ("rows.parquet row 5", "the response has no tokens"),
        ("rows.parquet row 7", "score is nan"),
    ]
    counts = manifest(tmp_path / "run", "train")["rows"]
    assert counts["in"] == 192 == counts["rejected"] + counts["held_out"] + counts["trained"]
    assert counts["rejected"] == 2

    body["data"]["max_bad_fraction"] = 0.01
    body["out"] = str(tmp_path / "other")
    message = refuse(3, "train", body)
    assert "2 of 192 rows (1 no tokens, 1 score not finite)" in message
    assert "rows.parquet row 5: the response has no tokens | rows.parquet row 7: score is nan" in message
    assert "data.max_bad_fraction (0.01)" in message


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        ("score", lambda i, row: str(row["score"]), "row 0: score is text, not a number"),
        ("response_ids", lambda i, row: "3 4 5", "row 0: response_ids is text, not a list"),
        (
            "response_ids",
            lambda i, row: [99] * len(row["response_ids"]),
            "response_ids[0] is 99, vocabulary 18",
        ),
        ("behavior_log_probs", lambda i, row: row["behavior_log_probs"][1:], "response_ids but"),
        ("prompt", lambda i, row: i, "row 0: prompt is a number"),
    ],
)
def test_cells_of_a_wrong_type_or_outside_the_vocabulary_exit_3(
    column: str,
    change: Callable[[int, Row], Any],
    said: str,
    body: Body,
    rows: list[Row],
    refuse: Refuse,
    tmp_path: Path,
) -> None:
    body["data"]["train_files"] = written(rows, tmp_path, **{column: change})
    message = refuse(3, "train", body)
    assert "192 of 192 rows" in message
    assert said in message


def test_a_batch_larger_than_the_rows_to_imitate_exits_2(body: Body, refuse: Refuse) -> None:
    body |= {"stages": ["sft"]}
    body["sft"]["batch_size"] = 5000
    assert "sft.batch_size 5000 is larger than the 96 rows" in refuse(2, "sft", body)
    body |= {"stages": ["reward"], "reward": {"files": body["sft"]["files"]}}
    assert "no column `chosen`" in refuse(3, "reward", body)


def test_a_function_of_the_user_that_fails_exits_8(
    body: Body, refuse: Refuse, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e2e_bad_rewards.py").write_text(
        "def raises(**columns):\n    return columns['nothere']\n"
        "def nan(**columns):\n    return float('nan')\n"
        "def text(**columns):\n    return 'good'\n"
        "def narrow(solution):\n    return 1.0\n"
    )
    body |= {"stages": ["score"]}
    body["score"] = {"files": str(whole / "rollout" / "trajectories.parquet")}
    for name, code, said in (
        ("raises", 8, "raised KeyError ('nothere') for trajectories.parquet row 0; mend the function"),
        ("nan", 8, "returned nan for trajectories.parquet row 0"),
        ("text", 8, "returned 'good' for trajectories.parquet row 0"),
        ("narrow", 2, "it is called with data_source, solution_str, ground_truth, extra_info by keyword"),
        ("rases", 2, "e2e_bad_rewards has no function 'rases'; did you mean raises?"),
    ):
        body["score"]["reward"] = f"e2e_bad_rewards:{name}"
        assert said in refuse(code, "score", body)


def test_an_update_that_is_not_finite_is_skipped_and_counted(
    body: Body, rows: list[Row], refuse: Refuse, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The square of such a value is infinite in float32, so the critic's gradients are.
    body["data"]["train_files"] = written(
        rows, tmp_path, score=lambda i, row: 1e30 if i % 40 == 0 else row["score"]
    )
    body["trainer"] = {"critic_warmup": 0}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 0
    counted = [line["guard/skipped"] for line in metrics(tmp_path / "run") if "guard/skipped" in line]
    skipped = manifest(tmp_path / "run", "train")["facts"]["skipped_updates"]
    assert counted == list(range(1, skipped + 1))
    assert 0 < skipped < len(metrics(tmp_path / "run"))
    assert capsys.readouterr().out.count("skip: critic/vf_loss is inf") == skipped
    for model in ("last", "critic"):
        found = weights(tmp_path / "run" / "train" / model)
        assert all(bool(tensor.isfinite().all()) for tensor in found.values())

    body["data"]["train_files"] = written(rows, tmp_path, score=lambda i, row: 1e30)
    body |= {"guards": {"preset": "off", "max_skips": 3}, "out": str(tmp_path / "other")}
    assert rein("train", write_recipe(tmp_path / "recipe.yaml", body)) == 4
    err = capsys.readouterr().err
    assert "critic/vf_loss is inf, 3 updates in a row" in err
    assert "the state before is saved" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "other" / "train" / "last").exists()
    assert drafts(tmp_path) == []
