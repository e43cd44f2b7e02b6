"""`rein deploy MODEL --to DIR`: exported models as versions v1, v2, ... and `current`, which names one.

A version is copied beside its place, on disk and compared by hash before it is there; then `current`, a link,
is replaced in one step. Killed at any moment, `current` names a whole model, and no half version is there.
`--rollback` goes back to what was current before; `--list` says what there is, with gates.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from rein.errors import CheckpointError, ConfigError
from rein.model_files import EXPORT, read_json, refuse_unwhole
from rein.runtime.lock import held
from rein.tracking.console import Console

CURRENT, NOTE = "current", "rein_deploy.json"
_VERSION = re.compile(r"v([1-9]\d*)")
_CHUNK = 2**22


def run(model: str | None, to: str | None, console: Console, *, rollback: bool, listed: bool) -> None:
    """One of the three; raises ConfigError where it is not said which, CheckpointError where it cannot be."""
    if to is None:
        raise ConfigError("rein deploy: --to is missing; give the folder that holds the versions")
    folder = Path(to).expanduser()
    if (model is not None) + rollback + listed != 1:
        raise ConfigError("rein deploy: give a model folder, or --rollback, or --list")
    if not listed and (folder / CURRENT).exists() and not (folder / CURRENT).is_symlink():
        raise ConfigError(f"--to: {folder / CURRENT} is no link, and would be lost; give another folder")
    if listed:
        for line in _lines(folder):
            console.say(line)
        return
    if rollback and not folder.is_dir():
        raise ConfigError(f"--to: {folder} is not there; give the folder that holds the versions")
    if model is not None:
        refuse_unwhole(Path(model).expanduser())
    with held(folder, "--to"):
        _sweep(folder)
        try:
            if model is None:
                _back(folder, console)
            else:
                _deploy(Path(model).expanduser(), folder, console)
        except OSError as error:
            why = f"{folder}: cannot be written ({error}); free space or give another --to"
            raise CheckpointError(why) from error


def current(folder: Path) -> str | None:
    """The name of the version that is served."""
    with suppress(OSError):
        return Path(os.readlink(folder / CURRENT)).name
    return None


def versions(folder: Path) -> list[str]:
    """Oldest first."""
    found = (
        [path.name for path in folder.iterdir() if _VERSION.fullmatch(path.name)] if folder.is_dir() else []
    )
    return sorted(found, key=lambda name: int(name[1:]))


def verify(version: Path) -> dict[str, Any]:
    """The note of a version whose files are all as they were deployed. Raises CheckpointError."""
    note = read_json(version / NOTE)
    if not isinstance(files := note.get("files"), dict) or not files:
        raise CheckpointError(
            f"{version}: has no {NOTE}, so it is no deployed version; deploy the model again"
        )
    for name, digest in files.items():
        if not (version / name).is_file() or _hash(version / name) != digest:
            raise CheckpointError(f"{version / name}: is not what was deployed; deploy the model again")
    return note


def _deploy(model: Path, folder: Path, console: Console) -> None:
    named = current(folder)
    taken = [one for one in (*versions(folder), named or "") if _VERSION.fullmatch(one)]
    name = f"v{max((int(one[1:]) for one in taken), default=0) + 1}"
    former = named if named is not None and (folder / named).is_dir() else None  # else somebody removed it
    draft = folder / f".{name}.{uuid.uuid4().hex[:8]}"
    try:
        draft.mkdir()
        files = {
            str(path.relative_to(model)): path for path in sorted(model.rglob("*")) if _counts(path, model)
        }
        digests = {relative: _copy(path, draft / relative) for relative, path in files.items()}
        told = read_json(model / EXPORT)
        exported, gate = told.get("files", {}), told.get("gate")
        if not isinstance(exported, dict) or not _is_gate(gate):
            raise CheckpointError(f"{model / EXPORT}: is not as export writes it; export the model again")
        for relative, digest in exported.items():
            if digests.get(relative) != digest:
                raise CheckpointError(f"{model / relative}: is not what was exported; export the model again")
        note = {
            "version": 1,
            "from": str(model.absolute()),
            "deployed": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "before": former,
            "gate": gate,
            "files": digests,
        }
        with (draft / NOTE).open("w", encoding="utf-8") as file:
            json.dump(note, file, indent=2, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
        verify(draft)
        refuse_unwhole(draft)
        for inner in (*(path for path in draft.rglob("*") if path.is_dir()), draft):
            _sync(inner)
        draft.rename(folder / name)
        _sync(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _point(folder, name)
    console.say(
        f"deployed: {folder / name}, now {CURRENT} ({_gate(note['gate'])}); before: {former or 'none'}"
    )


def _back(folder: Path, console: Console) -> None:
    now = current(folder)
    if now is None:
        raise ConfigError(f"{folder}: has no {CURRENT} version to go back from; deploy a model first")
    before = read_json(folder / now / NOTE).get("before")
    if not isinstance(before, str):
        raise ConfigError(f"{folder}: nothing was {CURRENT} before {now}; deploy another model")
    if before == now:
        raise ConfigError(f"{folder / now}: names itself as what was before it; deploy another model")
    refuse_unwhole(folder / before)
    verify(folder / before)
    _point(folder, before)
    console.say(f"rolled back: {CURRENT} is {folder / before} again, no longer {now}")


def _point(folder: Path, name: str) -> None:
    """Let `current` name a version, in one step."""
    link = folder / f".{CURRENT}.{uuid.uuid4().hex[:8]}"
    link.symlink_to(name)
    os.replace(link, folder / CURRENT)
    _sync(folder)


def _lines(folder: Path) -> list[str]:
    now, found = current(folder), []
    for name in versions(folder):
        mark = f"  <- {CURRENT}" if name == now else ""
        try:
            note = read_json(folder / name / NOTE)
        except CheckpointError as error:
            found.append(f"{name}  {error}{mark}")
            continue
        found.append(
            f"{name}  {note.get('deployed')}  {_gate(note.get('gate'))}  from {note.get('from')}{mark}"
        )
    return found or [f"{folder}: no version is deployed"]


def _is_gate(gate: Any) -> bool:
    """Whether this is what export writes of a gate, or nothing."""
    lines = gate.get("lines", []) if isinstance(gate, dict) else [] if gate is None else [gate]
    whole = isinstance(lines, list) and all(isinstance(line, dict) for line in lines)
    return whole and all({"check", "passed"} <= line.keys() for line in lines)


def _gate(gate: Any) -> str:
    if not _is_gate(gate):
        return "gate: not readable"
    if not gate or not gate.get("asked"):
        return "gate: not asked"
    if gate.get("passed"):
        return "gate: passed"
    wrong = [line["check"] for line in gate.get("lines", []) if not line["passed"]]
    return f"gate: FAILED ({', '.join(wrong)}), exported by force"


def _counts(path: Path, model: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(model).parts)
    return path.is_file() and not hidden and path.name != NOTE


def _copy(source: Path, target: Path) -> str:
    """Copy onto the disk; the hash of what was read."""
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with source.open("rb") as read, target.open("wb") as written:
        while chunk := read.read(_CHUNK):
            digest.update(chunk)
            written.write(chunk)
        written.flush()
        os.fsync(written.fileno())
    return digest.hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what a killed deploy has left: nothing names it."""
    for left in folder.iterdir():
        if re.fullmatch(r"\.v\d+\.[0-9a-f]{8}", left.name):
            shutil.rmtree(left, ignore_errors=True)
        elif re.fullmatch(rf"\.{CURRENT}\.[0-9a-f]{{8}}", left.name):
            left.unlink(missing_ok=True)
