"""A random tiny model, a little addition data, and one whole run that many tests read."""

from pathlib import Path
from typing import Any

import pytest
from e2e_run import Refuse, drafts, recipe, rein, write_recipe

from rein.data import addition
from rein.models.tiny import make_tiny


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


@pytest.fixture
def refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that must fail: its one line on stderr. No model, draft or manifest may be left."""

    def run(code: int, verb: str, body: dict[str, Any]) -> str:
        out = Path(body["out"])
        capsys.readouterr()
        found = rein(verb, write_recipe(tmp_path / "recipe.yaml", body))
        said = capsys.readouterr().err
        assert found == code, said
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert "; " in said, "what to do is missing"
        assert drafts(tmp_path) == []
        left = {path.name for path in out.rglob("*") if path.is_file()} if out.is_dir() else set()
        assert not left & {"model.safetensors", "manifest.json", "trajectories.parquet", "evaluation.json"}
        return said

    return run
