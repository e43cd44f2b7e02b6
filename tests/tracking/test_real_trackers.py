"""Each tracker's real package in its local or offline mode: killed twice, resumed, read back whole.

`make trackers` makes the environment that has the packages; without it these are skipped. The numbers are
read by the package's own reader; wandb has none in Python, so its file is read as its format says.
"""

import importlib.util
import json
import os
import pty
import signal
import sqlite3
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from track_run import value

from rein.tracking.jsonl import read_metrics

pytestmark = pytest.mark.slow

TRACK_RUN, ROOT = Path(__file__).with_name("track_run.py"), Path(__file__).parents[2]
NOWHERE = "http://127.0.0.1:9"  # where nothing listens: no tracker gets out
KL, MFU = "actor/ppo_kl", "perf/mfu@all"
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


def from_tensorboard(folder: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder / "train" / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return [(tag, event.step, event.value) for tag in tags for event in reader.Scalars(tag)]


def from_mlflow(folder: Path) -> Points:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("addition")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["actor.optim.lr"] == "1e-06"
    assert len(run.data.params["actor.note"]) == 500
    return [
        (name.replace("_at_", "@"), point.step, point.value)
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]


def from_wandb(folder: Path) -> Points:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "train" / "wandb").glob("offline-run-*/run-*.wandb")
    known_as = json.loads((folder / "train" / "trackers.json").read_text())["wandb"]
    assert file.name == f"run-{known_as}.wandb"
    found: Points = []
    for raw in leveldb_records(file.read_bytes()):
        record = Record.FromString(raw)
        said = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        step = record.history.step.num
        found += [(name, step, float(text)) for name, text in said.items() if name[0] != "_"]
    return found


def leveldb_records(data: bytes) -> list[bytes]:
    """Records of a log in LevelDB's format: blocks of 32 KiB, each piece with crc, length and kind."""
    assert data[:4] == b":W&B"
    place, whole, found = 7, b"", []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # full, last
            found.append(whole)
            whole = b""
    return found


def from_swanlab(folder: Path) -> Points:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    known_as = json.loads((folder / "train" / "trackers.json").read_text())["swanlab"]
    (file,) = (folder / "train" / "swanlog").glob("run-*/run-*.swanlab")
    assert file.name == f"run-{known_as}.swanlab"
    reader, found = DataStoreReader(), list[tuple[str, int, float]]()
    reader.open(str(file))
    while (raw := reader.scan()) is not None:
        record = Record.FromString(raw)
        if record.WhichOneof("record_type") == "scalar":
            found.append((record.scalar.key, record.scalar.step, record.scalar.value.number))
    return found


def from_trackio(folder: Path) -> Points:
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([len(S.get_run_records('addition')), S.get_logs('addition', 'small')]))"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, env=environment(folder), capture_output=True, text=True, check=True).stdout
    runs, lines = json.loads(said.splitlines()[-1])
    assert runs == 1
    ours = (KL, MFU)
    return [(name, line["step"], line[name]) for line in lines for name in ours if name in line]


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": from_tensorboard,
    "mlflow": from_mlflow,
    "wandb": from_wandb,
    "swanlab": from_swanlab,
    "trackio": from_trackio,
}


def whole(points: Points, last: int) -> None:
    """Every number of both metrics is there once, with its value."""
    for name, sign in ((KL, 1), (MFU, -1)):
        told = [(step, number) for each, step, number in points if each == name]
        assert Counter(step for step, _ in told) == Counter(range(1, last + 1)), name
        assert all(number == sign * value(step) for step, number in told)


@pytest.mark.parametrize("tracker", READERS)
def test_killed_twice_and_resumed_every_metric_is_there_once(tracker: str, tmp_path: Path) -> None:
    needs(tracker)
    for begin, last, end in ((0, 20, "kill"), (12, 30, "kill"), (25, 40, "close")):
        done = track(tmp_path, tracker, begin, last, end)
        assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stdout + done.stderr
        assert "training goes on without it" not in done.stderr
    whole(READERS[tracker](tmp_path), 40)
    assert len(read_metrics(tmp_path / "train" / "metrics.jsonl")) == 80


def test_a_run_from_the_start_is_a_run_of_its_own(tmp_path: Path) -> None:
    needs("tensorboard")
    for last in (30, 10):
        assert track(tmp_path, "tensorboard", 0, last, "close").returncode == 0
    whole(from_tensorboard(tmp_path), 10)


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
    whole(from_mlflow(tmp_path), 30)


@pytest.mark.parametrize(
    ("tracker", "said", "more"),
    [
        (
            "wandb",
            "wandb is logged out; run `wandb login`, or set WANDB_MODE=offline",
            {"WANDB_MODE": "online"},
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
