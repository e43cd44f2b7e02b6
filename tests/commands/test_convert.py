"""The verb: rows in = rows written + rows left out, rejects named, OUT whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from rein import cli
from rein.commands import convert_files
from rein.data.files import Source
from rein.data.parquet import metadata_of, read_rows
from rein.data.rejects import BadRow


def lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def pair(i: int) -> dict[str, Any]:
    return {"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"}


def convert(*words: object) -> int:
    return cli.main(["convert", "--force", *map(str, words)])


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path)]


def test_rows_in_are_rows_written_and_rows_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"prompt": "q", "chosen": "a", "rejected": "a"}
    file = lines(tmp_path / "in.jsonl", [pair(0), same, "{broken", [1], pair(1)])
    out = tmp_path / "out.parquet"
    assert convert(file, out, "--max-bad-fraction", "0.7") == 0
    said = capsys.readouterr().out
    assert f"{out}: 5 rows in = 2 written + 3 left out\n" in said
    assert "3 of 5 rows (2 unreadable, 1 chosen equals rejected)" in said
    assert "in.jsonl row 1: chosen and rejected are the same" in said
    assert rows_of(out) == [pair(0), pair(1)]
    rejects = [json.loads(line) for line in (tmp_path / "out.parquet.rejects.jsonl").read_text().splitlines()]
    assert [(r["where"], r["kind"]) for r in rejects] == [
        ("in.jsonl row 1", "chosen equals rejected"),
        ("in.jsonl line 3", "unreadable"),
        ("in.jsonl row 3", "unreadable"),
    ]


def test_too_many_bad_rows_write_nothing_but_their_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = {"prompt": "q", "chosen": "a", "rejected": "a"}
    file = lines(tmp_path / "in.jsonl", [*map(pair, range(40)), same])
    out = lines(tmp_path / "out.jsonl", ["old"])
    assert convert(file, out) == 3
    said = capsys.readouterr().err
    assert "1 of 41 rows (1 chosen equals rejected); first: in.jsonl row 40" in said
    assert "--max-bad-fraction (0.01)" in said
    assert out.read_text() == "old\n"
    assert (tmp_path / "out.jsonl.rejects.jsonl").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.jsonl",
        "out.jsonl",
        "out.jsonl.rejects.jsonl",
    ]
    assert convert(file, out, "--max-bad-fraction=0.05") == 0
    assert convert(lines(file, [pair(0)]), out) == 0
    assert not (tmp_path / "out.jsonl.rejects.jsonl").exists()  # it no longer holds true


def test_every_column_is_accounted_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"instruction": "q", "input": "", "output": "a", "source": "web", "images": None, "id": 3}
    assert convert(lines(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl") == 0
    said = capsys.readouterr().out
    for line in ("instruction -> prompt", "output -> response", "source -> extra_info", "id -> extra_info"):
        assert f"  {line}\n" in said
    assert "  images not carried: " in said
    assert rows_of(tmp_path / "out.jsonl") == [
        {"prompt": "q", "response": "a", "extra_info": {"source": "web", "id": 3}}
    ]


def test_folders_globs_and_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(3):
        lines(tmp_path / "in" / f"{i}.jsonl", [pair(i)])
    for words in ([tmp_path / "in"], [tmp_path / "in" / "*.jsonl"], sorted((tmp_path / "in").iterdir())):
        assert convert(*words, tmp_path / "out.parquet") == 0
        assert rows_of(tmp_path / "out.parquet") == [pair(i) for i in range(3)]
    assert "0.jsonl, 1.jsonl, 2.jsonl: trl, preferences" in capsys.readouterr().out


def test_options_stand_anywhere(tmp_path: Path) -> None:
    file, out = lines(tmp_path / "in.jsonl", [pair(0), pair(1)]), tmp_path / "out.jsonl"
    assert convert("--from", "openrlhf", file, "--to", "sft", out, "--limit=1") == 0
    assert rows_of(out) == [{"prompt": "q0", "response": "a0"}]
    assert convert(file, out, "--to", "trajectories") == 0
    assert [(row["response"], row["score"]) for row in rows_of(out)] == [
        ("a0", 1.0), ("b0", 0.0), ("a1", 1.0), ("b1", 0.0),
    ]  # fmt: skip
    assert convert(file, out, "--to", "prompts") == 0
    assert rows_of(out) == [{"prompt": "q0"}, {"prompt": "q1"}]


def test_a_large_file_is_streamed_without_columns_that_nothing_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 2 == 0} for i in range(30)]
    file, out = lines(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    assert convert(file, out) == 0
    small = rows_of(out)
    monkeypatch.setattr(convert_files, "HELD", 10)
    assert convert(file, out) == 0
    assert pq.read_schema(out).names == ["prompt", "response", "score"]
    assert metadata_of(Source(out, out.name))["rein.schema"] == "trajectories/1"
    assert rows_of(out) == small
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.parquet"]


def test_reins_own_scored_rows_make_pairs(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "response": str(i), "score": i, "temperature": 1.0} for i in (0, 2, 1)]
    assert convert(lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "--to", "preferences") == 0
    assert rows_of(tmp_path / "out.jsonl") == [{"prompt": "q", "chosen": "2", "rejected": "0"}]


def test_a_file_that_is_there_is_overwritten_only_by_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [lines(tmp_path / f"{i}.jsonl", [pair(i)]) for i in range(3)]
    before = files[-1].read_text()
    assert cli.main(["convert", *map(str, files)]) == 2
    assert "2.jsonl: exists already; name a new file last, or overwrite it with --force" in (
        capsys.readouterr().err
    )
    assert files[-1].read_text() == before
    assert cli.main(["convert", *map(str, files), "--force"]) == 0
    assert rows_of(files[-1]) == [pair(0), pair(1)]


def test_where_every_row_is_unusable_the_rejects_are_kept_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = lines(tmp_path / "in.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "a"}] * 2)
    assert convert(file, tmp_path / "out.jsonl", "--max-bad-fraction=1") == 3
    said = capsys.readouterr().err
    assert "nothing is left: unusable: 2 of 2 rows (2 chosen equals rejected); first: in.jsonl row 0" in said
    assert len((tmp_path / "out.jsonl.rejects.jsonl").read_text().splitlines()) == 2


def test_what_a_folder_holds_beside_the_files_read_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    for name in ("a.jsonl", "out.jsonl.rejects.jsonl", "b.json", "c.json", "manifest.json"):
        lines(folder / name, [pair(0)])
    told = f"{folder}: 2 .json files beside the .jsonl files not read: name them to read them\n"
    assert convert(folder, tmp_path / "out.jsonl") == 0
    said = capsys.readouterr().out
    assert told in said
    assert "1 rows in = 1 written" in said
    assert cli.main(["audit", str(folder), f"out={tmp_path}/run"]) == 0
    assert told in capsys.readouterr().out


def test_an_interrupted_convert_speaks_of_no_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*words: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rein.commands.convert.run", interrupt)
    assert convert("in.jsonl", tmp_path / "out.jsonl") == 130
    said = capsys.readouterr().err
    assert said == "error: interrupted: nothing is written half; give the same command again\n"


@pytest.mark.parametrize("odd", [float("nan"), float("-inf"), None, 0.5])
def test_log_probs_that_the_loader_refuses_are_left_out_and_counted(
    odd: float | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "q", "response": "a", "response_ids": [3, 4], "behavior_log_probs": [-0.5, 0.00001]}
    masked = {**row, "behavior_log_probs": [-0.5, odd], "response_mask": [1, 0]}
    rows = [row, {**row, "behavior_log_probs": [-0.5, odd]}, masked]
    assert convert(lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl") == 0
    assert ["behavior_log_probs" in row for row in rows_of(tmp_path / "out.jsonl")] == [True, False, True]
    assert "1 rows: log-probs left out, behavior unknown: some are not finite or above 0" in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["in.jsonl"], 2, "give the files to read, then the file to write"),
        (["in.jsonl", "out.csv"], 2, "OUT ends in neither .parquet nor .jsonl"),
        (["in.jsonl", "in.jsonl"], 2, "is among the files to read"),
        (["in.jsonl", "out.jsonl", "--from=tlr"], 2, "did you mean trl?"),
        (["in.jsonl", "out.jsonl", "--to=pairs"], 2, "known: prompts, trajectories, preferences, sft"),
        (["in.jsonl", "out.jsonl", "--max-bad-fraction=2"], 2, "is not in [0, 1]"),
        (["in.jsonl", "out.jsonl", "--limit=x"], 2, "'x' is not a number"),
        (["in.jsonl", "out.jsonl", "--log-probs=cooked"], 2, "known: raw, processed"),
        (["nothere.jsonl", "out.jsonl"], 3, "no such file or folder"),
        (["in.jsonl", "out.jsonl", "--from=vllm"], 3, "its rows look like"),
        (["sft.jsonl", "out.jsonl", "--to=preferences"], 3, "has no worse answers"),
        (["in.jsonl", "sft.jsonl", "out.jsonl"], 3, "the files are of several kinds"),
        (["odd.jsonl", "out.jsonl"], 3, "no known layout (columns: left, right)"),
        (["odd.jsonl", "out.jsonl"], 3, "nearest: none; rename or mend its columns"),
        (
            ["odd.jsonl", "out.jsonl"],
            3,
            "with --from vllm|openai|verl|llamafactory|trl|rein|solutions|openrlhf",
        ),
        (["odd.jsonl", "out.jsonl", "--from=verl"], 3, "verl has: generated responses (prompt, responses)"),
        (["none.jsonl", "out.jsonl"], 3, "no row that can be read"),
    ],
)
def test_wrong_use_is_one_line_that_says_what_to_do(
    words: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "in.jsonl", [pair(0)])
    lines(tmp_path / "sft.jsonl", [{"instruction": "q", "output": "a"}])
    lines(tmp_path / "odd.jsonl", [{"left": 1, "right": 2}])
    lines(tmp_path / "none.jsonl", ["{broken"])
    assert convert(*words) == code
    err = capsys.readouterr().err
    assert said in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "out.jsonl").exists()


def test_rejects_are_counted_by_reason_and_the_first_few_named(tmp_path: Path) -> None:
    with convert_files.Rejects(tmp_path / "out.parquet") as rejects:
        for i in range(9):
            rejects.add(f"in row {i}", BadRow("odd" if i % 3 else "even", f"reason {i}"))
        assert rejects.summary(20) == (
            "9 of 20 rows (6 odd, 3 even); first: "
            "in row 0: reason 0 | in row 1: reason 1 | in row 2: reason 2"
        )
        rejects.keep()
    assert len((tmp_path / "out.parquet.rejects.jsonl").read_text().splitlines()) == 9
