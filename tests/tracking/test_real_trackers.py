"""Each tracker's real package in its local or offline mode: killed twice, resumed, read back whole.

`make trackers` makes the environment that has the packages; without it these are skipped. The numbers are
read by track_read.py.
"""

import importlib.util
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rows_made import random_trajectories
from track_run import value

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.tracking.jsonl import TIMES, read_metrics

pytestmark = pytest.mark.slow

TRACK_RUN, ROOT = Path(__file__).with_name("track_run.py"), Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"  # where nothing listens: no tracker gets out
KL, MFU = "actor/ppo_kl", "perf/mfu@all"
TRACKERS = ("tensorboard", "mlflow", "wandb", "swanlab", "trackio")
Points = list[tuple[str, int, float]]


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; run make trackers")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """No account, no network; all files under `folder`."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("WANDB", "SWANLAB"))}
    offline = {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "HF_HUB_OFFLINE": "1"}
    places = {
        "TRACKIO_DIR": str(folder / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "HOME": str(folder),
    }
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | offline | places | proxies | {"PYTHONPATH": path} | more


def track(
    folder: Path, tracker: str, begin: int, last: int, end: str, **more: str
) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(TRACK_RUN), str(folder / "train"), tracker, str(begin), str(last), end]
    return subprocess.run(
        words, env=environment(folder, **more), cwd=folder, capture_output=True, text=True, timeout=300
    )


def points(folder: Path, tracker: str) -> Points:
    words = [sys.executable, str(TRACK_RUN.with_name("track_read.py")), str(folder), tracker]
    done = subprocess.run(
        words, env=environment(folder), cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [(name, step, number) for name, step, number in json.loads(done.stdout.splitlines()[-1])]


def whole(found: Points, last: int) -> None:
    """Every number of both metrics is there once, with its value."""
    for name, sign in ((KL, 1), (MFU, -1)):
        told = [(step, number) for each, step, number in found if each == name]
        assert Counter(step for step, _ in told) == Counter(range(1, last + 1)), name
        assert all(number == sign * value(step) for step, number in told)


@pytest.mark.parametrize("tracker", TRACKERS)
def test_killed_twice_and_resumed_every_metric_is_there_once(tracker: str, tmp_path: Path) -> None:
    needs(tracker)
    for begin, last, end in ((0, 20, "kill"), (12, 30, "kill"), (25, 40, "close")):
        done = track(tmp_path, tracker, begin, last, end)
        assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stdout + done.stderr
        assert "training goes on without it" not in done.stderr
    whole(points(tmp_path, tracker), 40)
    assert len(read_metrics(tmp_path / "train" / "metrics.jsonl")) == 80


def test_a_real_training_killed_and_resumed_is_the_same_in_all_of_them(tiny_lm: str, tmp_path: Path) -> None:
    """All five at once, beside metrics.jsonl, of `rein train`, which is killed after a snapshot."""
    for tracker in TRACKERS:
        needs(tracker)
    rows = [trajectory_row(row.with_score(float(i))) for i, row in enumerate(random_trajectories(12))]
    write_rows(tmp_path / "rows.parquet", rows, TRAJECTORIES, {})
    words = f"""
        model.path={tiny_lm} data.train_files={tmp_path}/rows.parquet data.holdout_fraction=0
        data.max_response_length=9 data.train_batch_size=4 actor.ppo_mini_batch_size=4 actor.ppo_epochs=1
        trainer.critic_warmup=0 threads=1 trainer.total_training_steps=7 trainer.save_freq=3 guards.preset=off
        trainer.project_name=addition trainer.experiment_name=small out={tmp_path}
    """.split()
    env = environment(tmp_path, KILL_AT="11")
    env["PYTHONPATH"] += os.pathsep + str(TRACK_RUN.parent)
    for more, code in ((",killer:Killer", -signal.SIGKILL), ("", 0)):
        command = [sys.executable, "-m", "rein", "train", *words]
        command.append(f"trainer.logger=[{','.join(TRACKERS)}{more}]")
        done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == code, done.stdout + done.stderr
        assert "training goes on without it" not in done.stderr
    lines = read_metrics(tmp_path / "train" / "metrics.jsonl")
    truth = {(name, line["number"]): number for line in lines for name, number in line.items()}
    wanted = {key for key, number in truth.items() if number is not None and key[0] not in ("number", "time")}
    assert len(wanted) > 300
    for tracker in TRACKERS:
        found = [point for point in points(tmp_path, tracker) if point[2] == point[2]]  # no NaN
        told = Counter((name, step) for name, step, _ in found)
        assert told.keys() == wanted, tracker
        assert set(told.values()) == {1}, tracker
        timed = [(name, step) for name, step, number in found if truth[name, step] != pytest.approx(number)]
        assert all(name.startswith(TIMES) for name, _ in timed), (tracker, timed)


def test_a_run_from_the_start_is_a_run_of_its_own(tmp_path: Path) -> None:
    needs("tensorboard")
    for last in (30, 10):
        assert track(tmp_path, "tensorboard", 0, last, "close").returncode == 0
    whole(points(tmp_path, "tensorboard"), 10)


def test_rounds_append_and_a_kill_after_them_doubles_nothing(tmp_path: Path) -> None:
    needs("tensorboard")
    for begin, last, end in ((0, 10, "close"), (10, 20, "close"), (20, 30, "kill"), (20, 40, "close")):
        track(tmp_path, "tensorboard", begin, last, end)
    whole(points(tmp_path, "tensorboard"), 40)
    sizes = [file.stat().st_size for file in sorted((tmp_path / "train" / "tensorboard").iterdir())]
    assert sizes[1] < 1.5 * sizes[0] < sizes[3]


def test_a_run_of_the_same_name_is_another_run_and_the_newest_goes_on(tmp_path: Path) -> None:
    needs("trackio")
    for begin, last, end in ((0, 30, "close"), (0, 20, "kill"), (12, 40, "close")):
        track(tmp_path, "trackio", begin, last, end)
    whole(points(tmp_path, "trackio"), 40)


def test_a_store_that_fails_in_mid_run_is_filled_when_the_run_is_resumed(tmp_path: Path) -> None:
    needs("mlflow")
    assert track(tmp_path, "mlflow", 0, 10, "kill").returncode == -signal.SIGKILL
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        store.execute(
            "CREATE TRIGGER full BEFORE INSERT ON metrics BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
    store.close()
    failed = track(tmp_path, "mlflow", 10, 20, "close")
    assert failed.returncode == 0
    assert failed.stderr.count("training goes on without it") == 1
    assert len(read_metrics(tmp_path / "train" / "metrics.jsonl")) == 40
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        store.execute("DROP TRIGGER full")
    store.close()
    assert track(tmp_path, "mlflow", 20, 30, "close").returncode == 0
    whole(points(tmp_path, "mlflow"), 30)


# ---- B54: a tracker stops training (what needs no package of these is in test_trackers.py)


def test_mlflow_takes_a_setting_of_2000_characters_and_a_metric_named_a_at_b(tmp_path: Path) -> None:
    needs("mlflow")
    code = (
        "from pathlib import Path\n"
        "from mlflow import MlflowClient\n"
        "from rein.tracking.fanout import open_trackers\n"
        "from rein.tracking.run import Run\n"
        "run = Run(Path('train'), 0, 'addition', 'small', {'long': 'x' * 2000, 'short': 3})\n"
        "fanout = open_trackers(['mlflow'], run)\n"
        "fanout.log({'a@b': 0.5, 'nan': float('nan')}, 7)\n"
        "fanout.close()\n"
        "data = MlflowClient().get_run(run.id_of('mlflow') or Run(Path('train'), 1).id_of('mlflow')).data\n"
        "assert data.params == {'long': 'x' * 500, 'short': '3'}, data.params\n"
        "assert data.metrics['a_at_b'] == 0.5 and data.metrics['nan'] != data.metrics['nan']\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), cwd=tmp_path, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "training goes on without it" not in done.stderr
    (line,) = read_metrics(tmp_path / "train" / "metrics.jsonl")
    assert (line["number"], line["a@b"], line["nan"]) == (7, 0.5, None)


@pytest.mark.parametrize(
    ("tracker", "said", "more"),
    [
        (
            "wandb",
            "wandb is logged out; run `wandb login`, or set WANDB_MODE=offline",
            {"WANDB_MODE": "online"},
        ),
        (
            "wandb",
            "wandb cannot be opened",
            {"WANDB_MODE": "online", "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": NOWHERE},
        ),
        ("swanlab", "swanlab is logged out; run `swanlab login`", {"SWANLAB_MODE": "online"}),
        ("mlflow", "mlflow cannot be opened", {"MLFLOW_TRACKING_URI": NOWHERE}),
        ("mlflow", "mlflow cannot be opened", {"MLFLOW_TRACKING_URI": "nosuch://x"}),
    ],
)
def test_a_misconfigured_tracker_stops_at_the_start_even_in_a_terminal(
    tracker: str, said: str, more: dict[str, Any], tmp_path: Path
) -> None:
    needs(tracker)
    ours, terminal = pty.openpty()  # where a package that may ask would ask
    words = [sys.executable, str(TRACK_RUN), str(tmp_path / "train"), tracker, "0", "3", "close"]
    done = subprocess.run(
        words, env=environment(tmp_path, **more), cwd=tmp_path, stdin=terminal, stdout=terminal,
        stderr=subprocess.PIPE, text=True, timeout=120,
    )  # fmt: skip
    os.close(ours)
    os.close(terminal)
    assert done.returncode == 1
    assert f"ConfigError: trainer.logger: {said}" in done.stderr
    assert not (tmp_path / "train").exists()
