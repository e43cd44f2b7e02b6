"""metrics.jsonl and the fan-out."""

import json
from pathlib import Path

import pytest

from rein.errors import CheckpointError, ConfigError
from rein.protocols import Tracker
from rein.tracking import TRACKERS
from rein.tracking.fanout import Fanout, open_trackers
from rein.tracking.jsonl import JsonlTracker, read_metrics
from rein.types import Metrics


class BrokenTracker:
    """Raises at every call, as a tracker does whose server is gone."""

    def log(self, metrics: Metrics, number: int) -> None:
        raise ConnectionError("no route to host")

    def close(self) -> None:
        raise ConnectionError("no route to host")


def numbers(path: Path) -> list[int]:
    return [line["number"] for line in read_metrics(path)]


def test_each_line_is_on_disk_at_once_and_nan_is_null(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log({"actor/ppo_kl": 0.5, "critic/vf_loss": float("nan"), "actor/grad_norm": float("inf")}, 3)
    line = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert line.pop("time") > 1.6e9
    assert line == {"number": 3, "actor/ppo_kl": 0.5, "critic/vf_loss": None, "actor/grad_norm": None}
    tracker.close()


def test_a_resumed_run_has_every_number_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    for number in range(1, 8):
        tracker.log({"x": float(number)}, number)
    tracker.close()
    resumed = JsonlTracker(path, from_number=4)  # the snapshot was taken after update 4
    for number in range(5, 10):
        resumed.log({"x": -float(number)}, number)
    resumed.close()
    assert numbers(path) == list(range(1, 10))
    assert [line["x"] for line in read_metrics(path)] == [1, 2, 3, 4, -5, -6, -7, -8, -9]


def test_a_run_from_the_start_does_not_keep_an_older_runs_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"number": 0, "time": 1}\n{"number": 1, "time": 1}\n')
    JsonlTracker(path).close()
    assert read_metrics(path) == []


def test_a_line_cut_off_by_a_kill_is_left_out_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"number": 1, "time": 1}\n{"number": 2, "ti')
    assert numbers(path) == [1]
    tracker = JsonlTracker(path, from_number=1)
    tracker.log({}, 2)
    tracker.close()
    assert numbers(path) == [1, 2]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"number": 1}\nnot json\n{"number": 3}\n')
    with pytest.raises(CheckpointError, match="line 2: no JSON"):
        read_metrics(path)


@pytest.mark.parametrize("line", ["null", "3", "[]", "{}", '{"number": "x"}', "[" * 100_000])
def test_a_line_that_holds_no_metrics_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"number": 1}}\n{line}\n{{"number": 3}}\n')
    for read in (lambda: read_metrics(path), lambda: JsonlTracker(path, from_number=2)):
        with pytest.raises(CheckpointError, match=r"line 2: no .*; remove that line"):
            read()


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path: Path) -> None:
    warnings: list[str] = []
    trackers: dict[str, Tracker] = {
        "broken": BrokenTracker(),
        "jsonl": JsonlTracker(tmp_path / "metrics.jsonl"),
    }
    fanout = Fanout(trackers, warnings.append)
    for number in range(3):
        fanout.log({"x": 1.0}, number)
    fanout.close()
    assert warnings == ["tracker broken: ConnectionError (no route to host); training goes on without it"]
    assert numbers(tmp_path / "metrics.jsonl") == [0, 1, 2]


def test_a_misconfigured_tracker_stops_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger: 'jsnl' is unknown; did you mean jsonl"):
        open_trackers(["jsnl"], tmp_path, from_number=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        open_trackers(["jsonl"], tmp_path / "file", from_number=0)


def test_metrics_are_always_written_to_the_file(tmp_path: Path) -> None:
    fanout = open_trackers(["console"], tmp_path, from_number=0)
    fanout.log({"x": 1.0}, 1)
    fanout.close()
    assert numbers(tmp_path / "metrics.jsonl") == [1]


@pytest.mark.parametrize("name", TRACKERS)
def test_every_tracker_of_the_table_logs_resumes_and_closes(name: str, tmp_path: Path) -> None:
    for from_number in (0, 1):
        tracker = TRACKERS[name](tmp_path, from_number)
        tracker.log({"val/score": 0.5, "bad": float("nan")}, from_number + 1)
        tracker.close()
