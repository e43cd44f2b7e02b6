"""metrics.jsonl and the fan-out."""

import json
import sys
import tomllib
from pathlib import Path

import pytest

from rein.config import names
from rein.errors import CheckpointError, ConfigError
from rein.protocols import Tracker
from rein.tracking import READY, TRACKERS
from rein.tracking.fanout import CONSOLE, Fanout, check_trackers, open_trackers
from rein.tracking.jsonl import JsonlTracker, read_metrics
from rein.tracking.mlflow import cleaned
from rein.tracking.run import Once, Run, flat, set_aside
from rein.types import Metrics

ROOT = Path(__file__).parents[2]


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


# ---- B54: a tracker stops training (test_real_trackers.py has the clauses that need a package)


class FailsAt:
    """Works until an update number, as a server does that is lost."""

    def __init__(self, number: int) -> None:
        self.number = number

    def log(self, metrics: Metrics, number: int) -> None:
        if number >= self.number:
            raise ConnectionError("no route to host")

    def close(self) -> None:
        pass


def test_with_a_tracker_lost_nan_and_a_resume_the_local_log_is_complete_and_steps_go_on(
    tmp_path: Path,
) -> None:
    warnings: list[str] = []
    for begin, last in ((0, 6), (4, 9)):
        fanout = open_trackers([], Run(tmp_path, begin), warn=warnings.append)
        fanout.trackers["lost"] = FailsAt(3)
        for number in range(begin + 1, last + 1):
            fanout.log({"actor/ppo_kl": number / 8, "a@b": 1.0, "critic/vf_loss": float("nan")}, number)
        fanout.close()
    assert len(warnings) == 2  # one of each process
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["number"] for line in lines] == list(range(1, 10))
    assert [line["actor/ppo_kl"] for line in lines] == [number / 8 for number in range(1, 10)]
    assert all(line["critic/vf_loss"] is None and line["a@b"] == 1.0 for line in lines)


def test_a_misconfigured_tracker_stops_at_the_start(tmp_path: Path) -> None:
    for opens in (lambda: open_trackers(["jsnl"], Run(tmp_path)), lambda: check_trackers(["jsnl"])):
        with pytest.raises(ConfigError, match=r"trainer\.logger: 'jsnl' is unknown; did you mean jsonl"):
            opens()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        open_trackers(["jsonl"], Run(tmp_path / "file"))


def test_metrics_are_always_written_to_the_file(tmp_path: Path) -> None:
    fanout = open_trackers(["console"], Run(tmp_path))
    fanout.log({"x": 1.0}, 1)
    fanout.close()
    assert numbers(tmp_path / "metrics.jsonl") == [1]


def test_the_recipe_names_the_trackers_of_the_table() -> None:
    assert (CONSOLE, *TRACKERS) == names.TRACKERS
    assert set(READY) == set(TRACKERS) - {"jsonl"}


PACKAGES = {"tensorboard": "tensorboard", "swanlab": "swanlab", "trackio": "trackio", "mlflow": "mlflow"}
PACKAGES |= {"wandb": "wandb"}


@pytest.mark.parametrize("name", PACKAGES)
def test_an_absent_package_stops_the_run_at_its_start_and_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)  # an import of it fails, as without the package
    said = rf"trainer\.logger: {name} needs a package .*; run pip install 'rein\[{name}\]'"
    for opens in (lambda: check_trackers([name]), lambda: open_trackers([name], Run(tmp_path))):
        with pytest.raises(ConfigError, match=said):
            opens()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras[name][0].partition("[")[0].partition(">")[0] == PACKAGES[name]


class Listed:
    """A tracker of the user's own: what it is told, in order."""

    def __init__(self, run: Run) -> None:
        self.run, self.told = run, list[tuple[int, Metrics]]()

    def log(self, metrics: Metrics, number: int) -> None:
        self.told.append((number, metrics))

    def close(self) -> None:
        pass


def refuses(run: Run) -> Tracker:
    raise OSError("no such\nhost")


def test_a_tracker_of_the_users_own_is_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "own_tracker", sys.modules[__name__])
    check_trackers(["own_tracker:Listed"])
    run = Run(tmp_path, 0, "addition", "first")
    fanout = open_trackers(["own_tracker:Listed"], run)
    fanout.log({"actor/ppo_kl": 0.5}, 3)
    fanout.close()
    own = fanout.trackers["own_tracker:Listed"]
    assert isinstance(own, Listed)
    assert (own.run, own.told) == (run, [(3, {"actor/ppo_kl": 0.5})])
    with pytest.raises(ConfigError, match=r"refuses cannot be opened \(OSError: no such\\nhost\); mend its"):
        open_trackers(["own_tracker:refuses"], run)


def test_a_store_that_only_appends_is_told_what_it_lacks_and_nothing_twice(tmp_path: Path) -> None:
    first = open_trackers([], Run(tmp_path))
    for number in range(1, 8):
        first.log({"x": float(number), "nan": float("nan")}, number)
    first.close()
    resumed = Run(tmp_path, from_number=5)
    open_trackers([], resumed).close()  # metrics.jsonl ends at 5 now
    store = Listed(resumed)
    has = {("x", number) for number in (1, 2, 4, 6, 7)}  # the killed process had come to 7; 3 was lost
    once = Once(store, resumed, lambda name, number: (name, number) in has)
    for number in range(6, 10):
        once.log({"x": float(number)}, number)
    assert store.told == [(number, {"x": float(number)}) for number in (3, 5, 8, 9)]


def test_each_name_of_a_number_is_told_once_and_the_file_has_every_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own_tracker", sys.modules[__name__])
    for begin in (0, 1):
        fanout = open_trackers(["own_tracker:Listed"], Run(tmp_path, begin))
        for metrics in ({"x": 1.0, "timing_s/other": 2.0}, {"timing_s/other": 3.0, "timing_s/probe": 4.0}):
            fanout.log(dict(metrics), 1)
        fanout.log({"x": 5.0}, 2)
        fanout.close()
        own = fanout.trackers["own_tracker:Listed"]
        assert isinstance(own, Listed)
        first = [(1, {"x": 1.0, "timing_s/other": 2.0}), (1, {"timing_s/probe": 4.0})]
        assert own.told == ([] if begin else first) + [(2, {"x": 5.0})]
        assert numbers(tmp_path / "metrics.jsonl") == [1, 1] * (1 + begin) + [2]


def test_the_id_of_a_run_is_kept_for_its_resume_and_not_for_a_start_anew(tmp_path: Path) -> None:
    Run(tmp_path).keep_id("wandb", "ab12")
    Run(tmp_path).keep_id("mlflow", "cd34")
    assert Run(tmp_path, from_number=1).id_of("wandb") == "ab12"
    assert Run(tmp_path, from_number=1).id_of("swanlab") is None
    assert Run(tmp_path).id_of("wandb") is None
    for text in ("[1]", "{"):
        (tmp_path / "trackers.json").write_text(text)
        with pytest.raises(ConfigError, match=r"trackers\.json: .*; remove it"):
            Run(tmp_path, from_number=1).id_of("wandb")


def test_local_files_written_anew_are_set_aside_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "offline-run-1-ab").mkdir()
    (tmp_path / "offline-run-1-cd").mkdir()
    set_aside(tmp_path, "offline-run-*-ab")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "offline-run-1-cd",
        "replaced-offline-run-1-ab",
    ]


def test_names_and_settings_as_mlflow_takes_them() -> None:
    assert cleaned("a@b//c<d") == "a_at_b/c_d"
    assert cleaned("actor/ppo_kl") == "actor/ppo_kl"
    assert flat({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}
