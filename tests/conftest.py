"""Random tiny models that many tests read and none changes."""

import itertools
import os
import resource
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from rein.models.tiny import make_tiny


def pytest_configure(config: pytest.Config) -> None:
    """Numbers are a CPU's, unless tests on a GPU are asked for."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The tests share the cores; so small models gain nothing from more threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_lm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a 2-layer model and its 18-token tokenizer: pad 0, eos 1, unk 2, digits 3-12, +-=;#."""
    return str(make_tiny(tmp_path_factory.mktemp("models") / "lm", seed=0, hidden=32, layers=2))


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """Inside, no file can grow beyond so many bytes: writing more fails as on a full disk."""

    @contextmanager
    def limit(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small file system in memory with these options."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            pytest.skip(f"a small disk cannot be mounted ({error})")
        if done.returncode:
            pytest.skip(f"a small disk cannot be mounted ({done.stderr.strip()})")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


MODULES = itertools.count()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module of one's own that can be imported; its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"own_module_{next(MODULES)}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    return write


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of this machine goes nowhere else."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
