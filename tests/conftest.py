"""Random tiny models that many tests read and none changes."""

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
