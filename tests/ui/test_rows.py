"""Rows are filtered, searched, ordered and colored; a file that cannot be read is said, and stays a page."""

import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs_made import HOSTILE, make_run, write, write_tokens, write_trajectories

from rein.models.tiny import make_tiny
from rein.ui import pieces
from rein.ui.folder import Broken
from rein.ui.table import Query, Tables

Page = Callable[..., str]
FILE = "score/trajectories.parquet"


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r">Row (\d+)</a>", text)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = make_run(tmp_path / "runs" / "a")
    write_trajectories(made / FILE)
    return made


def test_pages_go_on_where_the_last_ended(run: Path, page: Page) -> None:
    first = page(f"/rows?name=a&file={FILE}")
    assert "60 of 60 rows" in first
    assert numbers(first) == list(range(25))
    assert numbers(page(f"/rows?name=a&file={FILE}&page=2")) == list(range(50, 60))
    assert numbers(page(f"/rows?name=a&file={FILE}&page=99")) == list(range(50, 60))


def test_rows_are_filtered_by_score_length_and_text_and_ordered(run: Path, page: Page) -> None:
    at = f"/rows?name=a&file={FILE}"
    assert numbers(page(f"{at}&score_min=5.5")) == [55, 56, 57, 58, 59]
    assert numbers(page(f"{at}&score_min=5&score_max=5.2&sort=score&order=down")) == [52, 51, 50]
    assert numbers(page(f"{at}&length_min=7&score_max=3")) == [6, 13, 20, 27]
    assert numbers(page(f"{at}&q=NUMBER 60.")) == [59]
    assert numbers(page(f"{at}&q=what is 7 %2B")) == [7]
    assert numbers(page(f"{at}&behavior_max=-29.2")) == [59]
    assert numbers(page(f"{at}&sort=length&order=up"))[:2] == [0, 7]
    assert "No row is like that" in page(f"{at}&q=nowhere")


def test_a_bound_that_is_no_number_is_said(run: Path, page: Page) -> None:
    assert "abc is no number" in page(f"/rows?name=a&file={FILE}&score_min=abc")
    assert "60 of 60" in page(f"/rows?name=a&file={FILE}&unknown_min=abc&page=x&sort=drop")


def test_measures_are_means_over_tokens_that_count(tmp_path: Path) -> None:
    table = Tables().open(write_tokens(tmp_path / "t.parquet"))
    assert table.measure("log_ratio")[0] == pytest.approx((0 - 1 + 0.5) / 3)
    assert table.measure("advantage")[0] == pytest.approx((0.5 - 0.25) / 2)  # one is NaN
    assert table.measure("weight")[0] == pytest.approx(4 / 3)
    assert table.measure("kl")[0] == pytest.approx(0.8 / 3)
    assert np.isnan(table.measure("behavior")[0])


def test_a_file_that_changes_is_read_anew(tmp_path: Path) -> None:
    path, tables = tmp_path / "t.parquet", Tables()
    write_trajectories(path, 10)
    assert len(tables.open(path).select(Query(text="number"))) == 10
    write_trajectories(path, 20)
    assert len(tables.open(path).select(Query(text="number"))) == 20


def test_only_the_columns_and_row_groups_asked_for_are_read(tmp_path: Path) -> None:
    table = Tables().open(write_trajectories(tmp_path / "t.parquet", 60))
    batches = list(table.batches(["score"], [20]))
    assert [(first, batch.schema.names, batch.num_rows) for first, batch in batches] == [(16, ["score"], 16)]
    assert [row["score"] for row in table.take([59, 0, 20], ["score"])] == [5.9, 0.0, 2.0]


def test_chat_prompts_are_shown_and_searched(tmp_path: Path, page: Page) -> None:
    run = make_run(tmp_path / "runs" / "a")
    chats = [[{"role": "user", "content": f"Count to {i}"}] for i in (5, 6)]
    (run / "rollout").mkdir()
    pq.write_table(
        pa.table({"prompt": chats, "response": ["x", None]}), run / "rollout" / "trajectories.parquet"
    )
    at = "/rows?name=a&file=rollout/trajectories.parquet"
    assert "user: Count to 5" in page(at)
    assert numbers(page(f"{at}&q=count to 6")) == [1]


def test_tokens_are_colored_by_each_number_that_there_is(run: Path, page: Page) -> None:
    write_tokens(run / "train" / "tokens" / "000000.parquet")
    at = "/row?name=a&file=train/tokens/000000.parquet&row=0"
    text = page(at)
    for label in ("log-ratio to the reference", "advantage", "KL", "weight", "old log-prob"):
        assert f">{label}</a>" in text
    assert ">value</a>" not in text  # null in this file
    shades = re.findall(r'<span class="t (\w\d)( out)?" title="[^"]*">([^<]+)</span>', text)
    assert shades == [
        ("p0", "", "Hello"),
        ("m4", "", " world"),
        ("p2", "", "!"),
        ("p0", " out", "&lt;eos&gt;"),
    ]
    assert "log-ratio to the reference -1" in text
    kl = re.findall(r'<span class="t (\w\d)', page(f"{at}&color=kl"))
    assert kl == ["p0", "p4", "p1", "p0"]


def test_ids_are_read_by_a_tokenizer_in_the_run_that_gives_the_very_text(run: Path, page: Page) -> None:
    make_tiny(run / "train" / "best", seed=0, hidden=32, layers=1)
    right = {"prompt": ["1+2="], "response": ["3#3"], "response_ids": [[6, 17, 6, 1]]}
    pq.write_table(pa.table(right | {"behavior_log_probs": [[-0.1, -0.2, -0.3, -3.0]]}), run / FILE)
    text = page(f"/row?name=a&file={FILE}&row=0")
    assert re.findall(r'<span class="t (\w\d)" title="[^"]*">([^<]+)</span>', text)[0] == ("p0", "3")
    pq.write_table(pa.table(right | {"behavior_log_probs": [[-0.1] * 4], "response": ["4#4"]}), run / FILE)
    text = page(f"/row?name=a&file={FILE}&row=0")
    assert "no tokenizer in the run gives this very text back" in text
    assert "4#4" in text


def test_hostile_answers_are_text(run: Path, page: Page) -> None:
    write_trajectories(run / FILE, texts={0: HOSTILE})
    write_tokens(run / "train" / "tokens" / "000000.parquet", piece=HOSTILE)
    for address in (
        f"/rows?name=a&file={FILE}",
        f"/row?name=a&file={FILE}&row=0",
        "/row?name=a&file=train/tokens/000000.parquet&row=0",
        f"/rows?name=a&file={FILE}&q={quote(HOSTILE)}",
    ):
        text = page(address)
        assert "<img" not in text
        assert "alert(1)</script>" not in text
        assert "alert(1)" in text


def parquet(path: Path, **columns: object) -> None:
    pq.write_table(pa.table(columns), path)


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: write(path, "no parquet"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "harmed": lambda path: path.write_bytes(
        path.read_bytes()[:200] + b"\xff" * 400 + path.read_bytes()[600:]
    ),
    "no rows": lambda path: parquet(path, prompt=pa.array([], pa.string()), score=pa.array([], pa.float64())),
    "no columns": lambda path: pq.write_table(pa.table({}), path),
    "other columns": lambda path: parquet(path, x=[1, 2], y=[{"a": 1}, None]),
    "other types": lambda path: parquet(
        path, prompt=[1, 2], response=[[1], None], score=["a", "b"], response_ids=["x", "y"], tokens=[1, 2]
    ),
    "numbers": lambda path: parquet(
        path, score=[float("nan"), float("inf"), 1e308], response=["a", "b", None]
    ),
    "ragged": lambda path: parquet(
        path,
        tokens=[["a", "b"], None],
        old_log_probs=[[1.0], [2.0, 3.0]],
        reference_log_probs=[[1.0, 2.0], None],
        response_mask=[[True], []],
    ),
    "not utf-8": lambda path: parquet(
        path, response=pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff\xfe"]).buffers())
    ),
    "same names": lambda path: pq.write_table(
        pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["score", "score"]), path
    ),
    "odd times": lambda path: parquet(path, t=pa.array([2**62, 1], pa.timestamp("us"))),
}


@pytest.mark.parametrize("harm", BROKEN.values(), ids=BROKEN)
def test_whatever_is_wrong_with_a_file_there_is_a_page(
    run: Path, page: Page, harm: Callable[[Path], object]
) -> None:
    harm(run / FILE)
    at = f"name=a&file={FILE}"
    page(f"/rows?{at}")
    for query in ("&q=a", "&score_min=0", "&sort=score&order=down", "&sort=length", "&log_ratio_min=0"):
        page(f"/rows?{at}{query}")
    found = (
        page(f"/row?{at}&row=0", 404)
        if harm in (BROKEN["no rows"], BROKEN["no columns"])
        else page(f"/row?{at}&row=0")
    )
    assert "Internal" not in found
    page("/run?name=a")


def test_a_broken_file_is_a_sentence_with_its_name(run: Path, page: Page) -> None:
    (run / FILE).write_bytes(b"no parquet at all")
    assert "trajectories.parquet: cannot be read as Parquet" in page(f"/rows?name=a&file={FILE}")


def test_a_row_that_is_not_there_is_said(run: Path, page: Page) -> None:
    assert "the file has 60 rows" in page(f"/row?name=a&file={FILE}&row=60", 404)


def test_too_many_rows_are_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rein.ui.table.MOST_ROWS", 10)
    table = Tables().open(write_trajectories(tmp_path / "t.parquet"))
    assert len(table.select(Query())) == 60
    with pytest.raises(Broken, match="more than 10 rows"):
        table.select(Query(text="a"))


def test_line_ends_are_seen_and_long_answers_come_in_parts() -> None:
    assert pieces.visible("a\n") == "a↵\n"
    assert pieces.visible("") == "∅"
    count = pieces.MOST + 5
    row = {"advantages": [1.0] * count}
    found = pieces.colored(row, ["x"] * count, "advantage", part=1)
    assert found is not None
    assert [piece.number for piece in found.pieces] == list(range(pieces.MOST, count))
