"""A random tiny model and prompts for it."""

from pathlib import Path

import pytest

from rein.models.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0, hidden=32, layers=1)


@pytest.fixture(scope="session")
def other_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models") / "other", seed=1, hidden=32, layers=1)
