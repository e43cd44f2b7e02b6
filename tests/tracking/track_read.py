"""What a tracker has of the run of track_run.py, by the package's own reader: JSON of [name, step, value].

python track_read.py FOLDER TRACKER. wandb has no reader in Python, so its file is read as its format says.
"""

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path

Points = list[tuple[str, int, float]]


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
    assert float(run.data.params["actor.optim.lr"]) > 0
    assert all(len(text) <= 500 for text in run.data.params.values())
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
    from trackio.sqlite_storage import SQLiteStorage

    lines = SQLiteStorage.get_logs("addition", "small")  # of the newest run of that name
    ours = [(line["step"], line, line.keys() - {"step", "timestamp"}) for line in lines]
    return [(name, step, line[name]) for step, line, names in ours for name in names]


READERS: dict[str, Callable[[Path], Points]] = {
    "tensorboard": from_tensorboard,
    "mlflow": from_mlflow,
    "wandb": from_wandb,
    "swanlab": from_swanlab,
    "trackio": from_trackio,
}


if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[2]](Path(sys.argv[1]))))
