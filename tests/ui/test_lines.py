"""A file that is still written gives each complete line once, whatever happens to it."""

import os
from pathlib import Path

from runs_made import metrics_line

from rein.ui.lines import LONGEST, Curves, Events, Tail


def read(tail: Tail, path: Path) -> tuple[list[bytes], int]:
    """The lines that came, and how often everything was given again."""
    anew: list[int] = []
    lines = list(tail.read(path, lambda: anew.append(1)))
    return lines, len(anew)


def test_lines_come_once_and_a_half_written_one_when_it_is_whole(tmp_path: Path) -> None:
    path, tail = tmp_path / "lines", Tail()
    path.write_bytes(b"one\ntwo\nthr")
    assert read(tail, path) == ([b"one", b"two"], 1)
    assert read(tail, path) == ([], 0)
    with path.open("ab") as file:
        file.write(b"ee\nfour\n")
    assert read(tail, path) == ([b"three", b"four"], 0)


def test_a_file_that_was_cut_is_read_again(tmp_path: Path) -> None:
    path, tail = tmp_path / "lines", Tail()
    path.write_bytes(b"one\ntwo\nthree\n")
    read(tail, path)
    path.write_bytes(b"one\n")
    assert read(tail, path) == ([b"one"], 1)


def test_a_file_with_other_lines_of_the_same_length_is_read_again(tmp_path: Path) -> None:
    path, tail = tmp_path / "lines", Tail()
    path.write_bytes(b"one\ntwo\n")
    read(tail, path)
    with path.open("r+b") as file:  # the same file on disk
        file.write(b"uno\ndue\ntre\n")
    assert read(tail, path) == ([b"uno", b"due", b"tre"], 1)


def test_a_file_that_was_replaced_or_rotated_is_read_again(tmp_path: Path) -> None:
    path, tail = tmp_path / "lines", Tail()
    path.write_bytes(b"one\ntwo\n")
    read(tail, path)
    (tmp_path / "new").write_bytes(b"1\n2\n3\n4\n5\n6\n7\n")
    os.replace(tmp_path / "new", path)
    lines, anew = read(tail, path)
    assert (len(lines), anew) == (7, 1)
    path.unlink()
    assert read(tail, path) == ([], 1)


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    path, tail = tmp_path / "lines", Tail()
    path.write_bytes(b"one\n" + b"x" * (3 * LONGEST) + b"\ntwo\n")
    assert read(tail, path) == ([b"one", b"two"], 1)
    assert read(tail, path) == ([], 0)


def test_curves_keep_what_is_drawn_and_name_what_is_no_line(tmp_path: Path) -> None:
    path, curves = tmp_path / "metrics.jsonl", Curves(["val/score"])
    huge = '{"number": 3, "val/score": 1' + "0" * 400 + "}\n"
    path.write_text(
        metrics_line(1)
        + '{"number": 2, "val/score": NaN}\n'
        + huge
        + '{"number": "4", "val/score": 1}\n'
        + '["val/score"]\n'
        + '{"val/score": \n'
        + "[" * 100_000
        + '"val/score"\n'
        + '{"number": 9}\n'
        + '{"number": 10, "val/sc'
    )
    curves.refresh(path)
    assert [line["number"] for line in curves.lines] == [1, 2, 3]
    assert [line["val/score"] for line in curves.lines] == [0.01, None, None]
    assert (curves.number, curves.bad) == (9, 4)
    path.write_text(metrics_line(1))
    curves.refresh(path)
    assert (len(curves.lines), curves.number, curves.bad) == (1, 1, 0)


def test_lines_of_a_journal_that_nobody_wrote_are_left_out(tmp_path: Path) -> None:
    path, events = tmp_path / "journal.jsonl", Events()
    path.write_text('{"seq": 1, "kind": "end"}\n{"seq": 2}\n{"seq": 3, "kind": "resume"}\n7\n')
    events.refresh(path)
    assert [line["seq"] for line in events.lines] == [1]
