"""Random tiny models that many tests read and none changes."""

import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from rein.models.tiny import make_tiny


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
