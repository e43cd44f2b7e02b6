"""Where a file or folder is written until it is whole: under a name beside its target, then renamed.

What a killed process left beside a target goes when that target is written next. Knows nothing of contents.
"""

import glob
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

OLD = ".old"  # ends the name of a target that is set aside until the new one stands


def draft_of(target: Path) -> Path:
    """A new name beside `target`, which is put back where it was set aside and never replaced."""
    _sweep(target)
    return _beside(target)


def replace_folder(draft: Path, target: Path) -> None:
    """Put a finished folder in place of `target`, which is never half there."""
    if target.exists():
        target.rename(f"{_beside(target)}{OLD}")
    draft.rename(target)
    _sweep(target)


def twin_folder(folder: Path, target: Path) -> None:
    """Put the same files in place of `target`, whole or not at all: on one disk they take no room twice.

    For folders whose files are replaced, never written into.
    """
    draft = draft_of(target)
    try:
        shutil.copytree(folder, draft, copy_function=_link)
        replace_folder(draft, target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")


def _sweep(target: Path) -> None:
    """Remove what was left beside the target: drafts, drafts of drafts (two dots), older ones set aside."""
    name = f"{glob.escape(target.name)}.{'[0-9a-f]' * 8}*"
    for left in [path for dots in (".", "..") for path in target.parent.glob(dots + name)]:
        with suppress(OSError):  # writing the target, which comes next, says more
            if left.name.endswith(OLD) and not target.exists():
                left.rename(target)
            elif left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
