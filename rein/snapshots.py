"""Run state on disk: saved whole or not at all, verified on load, older ones kept until the new one is whole.

A snapshot is a folder `step-<number>` holding state.json and safetensors files, one or one for each rank;
state.json carries the kind of run, the sha256 of every file and its own. A tensor that was cut over ranks has
rows in several files, in their order. No pickle is ever read. Knows nothing of what the state means.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rein.errors import CheckpointError
from rein.sharded import is_cut, own_part

VERSION = 6
OURS = re.compile(r"(step|\.old)-(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class RunState:
    """All a restore brings back: tensors by name, the rest as JSON."""

    tensors: dict[str, Tensor]
    meta: dict[str, Any]
    folder: Path | None = None  # that it was read from


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a snapshot, and the whole shapes of the tensors of which it holds a part."""

    file: str
    sha256: str
    cut: dict[str, list[int]]


Write = Callable[[Path, Mapping[str, Tensor]], list[Shard]]  # into a draft folder; all its files in order


def write_shard(folder: Path, file: str, tensors: Mapping[str, Tensor]) -> Shard:
    """Write one file of a snapshot: of tensors that are cut over ranks, this rank's rows."""
    own = {name: own_part(tensor).detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(_unshared(own), folder / file)
    _fsync(folder / file)
    cut = {name: list(tensor.shape) for name, tensor in tensors.items() if is_cut(tensor)}
    return Shard(file, _sha256(folder / file), cut)


def write_alone(folder: Path, tensors: Mapping[str, Tensor]) -> list[Shard]:
    """All tensors in one file."""
    return [write_shard(folder, "tensors.safetensors", tensors)]


class Snapshots:
    """The ring of snapshots of one kind of run in one folder; the `keep` newest stay."""

    def __init__(
        self, folder: Path, *, kind: str = "train", keep: int = 2, write: Write = write_alone
    ) -> None:
        self.folder, self.kind, self.keep, self.write = folder, kind, keep, write

    def save(self, number: int, state: RunState, *, protect: Collection[int] = ()) -> Path:
        """Write beside, fsync, rename; then rotate: the `keep` newest, this one and the protected ones stay.

        Raises CheckpointError, which names the older ones that stay.
        """
        target = self.folder / f"step-{number}"
        draft = self.folder / f".draft-{uuid.uuid4().hex[:8]}"
        try:
            draft.mkdir(parents=True)
            _describe(draft, self.kind, number, state.meta, self.write(draft, state.tensors))
            if target.exists():  # read as step-<number> until the new one stands
                shutil.rmtree(aside := self.folder / f".old-{number}", ignore_errors=True)
                target.rename(aside)
            draft.rename(target)
            _fsync(self.folder)
        except (OSError, SafetensorError) as error:
            older = ", ".join(f"step-{n}" for n in self.numbers())
            raise CheckpointError(
                f"{target}: cannot be saved ({error}); free space or choose another out=; "
                f"{f'older ones stay: {older}' if older else 'there is no older one'}"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        folders = self._folders()
        stay = {folders.get(n) for n in (number, *protect, *self.numbers()[: self.keep])}
        for old in {*folders.values(), *self._leftovers()} - stay:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def load(self, number: int) -> RunState:
        """The snapshot of this number, verified. Raises CheckpointError that names the file and its fault."""
        folder = self._folders().get(number, self.folder / f"step-{number}")
        return load(folder, kind=self.kind, number=number)

    def numbers(self) -> list[int]:
        """Of the snapshots that are there, whole or not, newest first."""
        return list(self._folders())

    def newest(self) -> tuple[RunState | None, list[str]]:
        """The newest whole snapshot, and a line for each broken one that was passed over.

        Raises CheckpointError when there are snapshots and none is whole: never a silent fresh start.
        """
        passed_over: list[str] = []
        for number in self.numbers():
            try:
                return self.load(number), passed_over
            except CheckpointError as error:
                passed_over.append(str(error))
        if passed_over:
            raise CheckpointError(
                f"{passed_over[0]}. No whole snapshot is left; start anew with resume=never"
            )
        return None, passed_over

    def drop_after(self, number: int) -> None:
        """Forget what came after `number`: the run goes on from there, the later ones are another branch."""
        for found, folder in self._folders().items():
            if found > number:
                shutil.rmtree(folder)

    def clear(self) -> None:
        """Forget this run's snapshots (resume=never)."""
        for folder in {*self._folders().values(), *self._leftovers()}:
            shutil.rmtree(folder)

    def _leftovers(self) -> list[Path]:
        """What a process that was killed amid a save left behind."""
        return [path for kind in (".draft-*", ".old-*") for path in self.folder.glob(kind)]

    def _folders(self) -> dict[int, Path]:
        """By number, newest first; one that was set aside counts where its successor never stood."""
        found: dict[int, Path] = {}
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else ():  # .old- before step-
            name = OURS.fullmatch(path.name)
            if name and path.is_dir():
                found[int(name[2])] = path
        return dict(sorted(found.items(), reverse=True))


def load(folder: Path, *, kind: str | None = "train", number: int | None = None) -> RunState:
    """Read and verify one snapshot, wherever it lies; of any kind or number where none is given.

    Raises CheckpointError that names what is missing, damaged or of another kind; the caller says what to do
    instead.
    """
    state_file = folder / "state.json"
    try:
        body = json.loads(state_file.read_text(encoding="utf-8"))
        if not isinstance(body, dict) or "version" not in body:
            raise CheckpointError(f"{state_file}: is no state of Rein's")
        if body["version"] != VERSION:
            raise CheckpointError(
                f"{state_file}: version {body['version']!r} is not {VERSION} (another release wrote it)"
            )
        claimed = body.pop("sha256")
        if claimed != _body_hash(body):
            raise CheckpointError(f"{state_file}: damaged (checksum differs)")
        if kind not in (None, body["kind"]):
            raise CheckpointError(f"{state_file}: is of {body['kind']}, not of {kind}")
        if number not in (None, body["number"]):
            raise CheckpointError(f"{state_file}: is step {body['number']}, not {number}; rename the folder")
        if body["version"] == 4:
            body |= {"files": {"tensors.safetensors": body["tensors_sha256"]}, "cut": {}}
        return RunState(_assembled(folder, body["files"], body["cut"]), body["meta"], folder)
    except CheckpointError:
        raise
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{state_file}: is no state of Rein's ({error!r})") from error
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise CheckpointError(f"{folder}: not a whole snapshot ({where})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{state_file}: damaged ({error!r})") from error
    except (SafetensorError, RuntimeError) as error:  # the latter of parts that do not fit together
        raise CheckpointError(f"{folder}: damaged ({error!r})") from error


def _describe(draft: Path, kind: str, number: int, meta: dict[str, Any], shards: list[Shard]) -> None:
    """state.json; then the folder is on the disk for good."""
    body: dict[str, Any] = {"version": VERSION, "kind": kind, "number": number}
    body["meta"] = json.loads(json.dumps(meta))
    body["files"] = {shard.file: shard.sha256 for shard in shards}
    body["cut"] = {name: shape for shard in shards for name, shape in shard.cut.items()}
    body["sha256"] = _body_hash(body)
    (draft / "state.json").write_text(json.dumps(body), encoding="utf-8")
    for shard in shards:
        shutil.copymode(draft / "state.json", draft / shard.file)
    for path in (draft / "state.json", draft):
        _fsync(path)


def _assembled(folder: Path, files: Mapping[str, str], cut: Mapping[str, list[int]]) -> dict[str, Tensor]:
    """The whole tensors of verified files. Raises CheckpointError where a part is missing."""
    found: dict[str, list[Tensor]] = {}
    for file, sha256 in files.items():
        if _sha256(folder / file) != sha256:
            raise CheckpointError(f"{folder / file}: damaged (checksum differs)")
        for name, tensor in load_file(folder / file).items():
            found.setdefault(name, []).append(tensor)
    whole = {name: torch.cat(parts) if name in cut else parts[0] for name, parts in found.items()}
    for name, shape in cut.items():
        if name not in whole or list(whole[name].shape) != shape:
            raise CheckpointError(f"{folder / 'state.json'}: damaged (parts of {name} are missing)")
    return whole


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
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
