"""A random tiny model, a little addition data, and one whole run that many tests read."""

from pathlib import Path

import pytest
import torch
from e2e_run import recipe, rein, write_recipe

from rein.data import addition
from rein.models.tiny import make_tiny


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0, hidden=32, layers=2)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addition")
    addition.write(folder, 0, demonstrations=96, prompts=96, dev=8, test=12, pairs=96)
    return folder


@pytest.fixture(scope="session")
def whole(tiny: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of every stage done once; recipe.yaml lies beside it."""
    folder = tmp_path_factory.mktemp("whole")
    file = write_recipe(folder / "recipe.yaml", recipe(tiny, data, folder / "run"))
    assert rein("run", file) == 0
    return folder / "run"
