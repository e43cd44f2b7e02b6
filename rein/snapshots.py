"""Run state on disk: saved whole or not at all, verified on load, older ones kept until the new one is whole.

A snapshot is a folder `step-<number>` holding tensors.safetensors and state.json; state.json carries the
sha256 of the tensors and its own. No pickle is ever read. Knows nothing of what the state means.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rein.errors import CheckpointError

VERSION = 3


@dataclass(frozen=True, slots=True)
class RunState:
    """All a restore brings back: tensors by name, the rest as JSON."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class Snapshots:
    """The ring of snapshots in one folder; `keep` newest stay."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def save(self, number: int, state: RunState) -> Path:
        """Write beside, fsync, rename; then rotate. Raises CheckpointError; the older snapshots stay."""
        target = self.folder / f"step-{number}"
        draft = self.folder / f".draft-{uuid.uuid4().hex[:8]}"
        try:
            draft.mkdir(parents=True)
            tensors = {name: tensor.detach().contiguous() for name, tensor in state.tensors.items()}
            save_file(_unshared(tensors), draft / "tensors.safetensors")
            body = {"version": VERSION, "number": number, "meta": json.loads(json.dumps(state.meta))}
            body["tensors_sha256"] = _sha256(draft / "tensors.safetensors")
            body["sha256"] = _body_hash(body)
            (draft / "state.json").write_text(json.dumps(body), encoding="utf-8")
            shutil.copymode(draft / "state.json", draft / "tensors.safetensors")
            for path in (*draft.iterdir(), draft):
                _fsync(path)
            if target.exists():
                target.rename(self.folder / f".old-{uuid.uuid4().hex[:8]}")
            draft.rename(target)
            _fsync(self.folder)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{target}: cannot be saved ({error}); free space or choose another out=; older ones stay"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        for old in (*self._all()[self.keep :], *self._leftovers()):
            shutil.rmtree(old, ignore_errors=True)
        return target

    def newest(self) -> tuple[RunState | None, list[str]]:
        """The newest whole snapshot, and a line for each broken one that was passed over.

        Raises CheckpointError when there are snapshots and none is whole: never a silent fresh start.
        """
        passed_over: list[str] = []
        for folder in self._all():
            try:
                return load(folder), passed_over
            except CheckpointError as error:
                passed_over.append(str(error))
        if passed_over:
            raise CheckpointError(
                f"{passed_over[0]}. No whole snapshot is left; start anew with resume=never"
            )
        return None, passed_over

    def drop_after(self, number: int) -> None:
        """Forget what came after `number`: the run goes on from there, the later ones are another branch."""
        for folder in self._all():
            if int(folder.name[5:]) > number:
                shutil.rmtree(folder)

    def clear(self) -> None:
        """Forget this run's snapshots (resume=never)."""
        for folder in (*self._all(), *self._leftovers()):
            shutil.rmtree(folder)

    def _leftovers(self) -> list[Path]:
        """What a process that was killed amid a save left behind."""
        return [path for kind in (".draft-*", ".old-*") for path in self.folder.glob(kind)]

    def _all(self) -> list[Path]:
        """Newest first, by number."""
        if not self.folder.is_dir():
            return []
        numbered = [(int(p.name[5:]), p) for p in self.folder.glob("step-*") if p.name[5:].isdigit()]
        return [path for _, path in sorted(numbered, reverse=True)]


def load(folder: Path) -> RunState:
    """Read and verify one snapshot.

    Raises CheckpointError that names what is missing or damaged; the caller says what to do instead.
    """
    state_file, tensor_file = folder / "state.json", folder / "tensors.safetensors"
    try:
        body = json.loads(state_file.read_text(encoding="utf-8"))
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{state_file}: version {body['version']} is not {VERSION} (another release wrote it)"
            )
        claimed = body.pop("sha256")
        if claimed != _body_hash(body):
            raise CheckpointError(f"{state_file}: damaged (checksum differs)")
        if body["tensors_sha256"] != _sha256(tensor_file):
            raise CheckpointError(f"{tensor_file}: damaged (checksum differs)")
        return RunState(load_file(tensor_file), body["meta"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{folder}: not a whole snapshot ({error!r})") from error


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.data_ptr()
        result[name] = tensor.clone() if pointer in seen and tensor.numel() else tensor
        seen.add(pointer)
    return result


def _body_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
