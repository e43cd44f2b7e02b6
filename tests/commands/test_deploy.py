"""`rein deploy`: whole versions only, `current` moved in one step, back again, and kills at any moment."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rein import cli
from rein.commands import deploy
from rein.errors import CheckpointError, ConfigError
from rein.model_files import refuse_unwhole
from rein.runtime.lock import held
from rein.tracking.console import Console

ROOT = Path(__file__).parents[2]
KILLS = 50


class Said(Console):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def model(tiny_lm: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_lm, tmp_path / "model"))


def told(folder: Path, **gate: object) -> None:
    """What export leaves of its gate, and the hashes of its files."""
    files = {file.name: deploy._hash(file) for file in folder.iterdir() if file.name != "rein_export.json"}
    (folder / "rein_export.json").write_text(json.dumps({"gate": gate, "files": files}))


def run(model: Path | None, to: Path, *, rollback: bool = False, listed: bool = False) -> list[str]:
    console = Said()
    deploy.run(None if model is None else str(model), str(to), console, rollback=rollback, listed=listed)
    return console.lines


def test_versions_stay_and_current_moves(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "srv"
    told(model, asked=True, passed=True, forced=False, lines=[])
    run(model, to)
    (model / "new.json").write_text("{}")
    told(model, asked=True, passed=False, forced=True, lines=[{"check": "max_kl", "passed": False}])
    run(model, to)
    assert os.readlink(to / "current") == "v2"
    assert (to / "current" / "new.json").exists()
    assert not (to / "v1" / "new.json").exists()
    for name in ("v1", "v2"):
        deploy.verify(to / name)
    first, second = run(None, to, listed=True)
    assert first.startswith("v1  ")
    assert "gate: passed" in first
    assert not first.endswith("current")
    assert "gate: FAILED (max_kl), exported by force" in second
    assert second.endswith("<- current")
    assert sorted(path.name for path in to.iterdir()) == ["current", "v1", "v2"]


def test_going_back_is_to_what_was_current_before(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "srv"
    for _ in range(3):
        run(model, to)
    run(None, to, rollback=True)
    assert deploy.current(to) == "v2"
    run(model, to)  # v4, after v2 was current
    run(None, to, rollback=True)
    assert deploy.current(to) == "v2"
    run(None, to, rollback=True)
    assert deploy.current(to) == "v1"
    with pytest.raises(ConfigError, match="nothing was current before v1"):
        run(None, to, rollback=True)
    assert deploy.versions(to) == ["v1", "v2", "v3", "v4"]


def test_going_back_to_a_damaged_version_is_refused(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "srv"
    run(model, to)
    run(model, to)
    with (to / "v1" / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(CheckpointError, match=r"v1/model.safetensors: is not what was deployed"):
        run(None, to, rollback=True)
    assert deploy.current(to) == "v2"


def cut(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda m: (m / "config.json").unlink(), "has no config.json"),
        (lambda m: (m / "model.safetensors").unlink(), "model.safetensors is not there"),
        (lambda m: [f.unlink() for f in m.glob("token*")], "holds no tokenizer"),
        (cut, "is cut off"),
        (lambda m: (m / "model.safetensors").write_bytes(b"\0" * 64), "is cut off or no safetensors"),
        (lambda m: (m / "config.json").write_text("{"), "cannot be read"),
        (
            lambda m: (m / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "lost.safetensors"}}'
            ),
            "lost.safetensors is not there",
        ),
        (lambda m: shutil.rmtree(m), "is no folder"),
    ],
)
def test_what_is_no_whole_model_is_refused(harm: object, said: str, model: Path, tmp_path: Path) -> None:
    harm(model)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=said):
        run(model, tmp_path / "srv")
    assert not (tmp_path / "srv").exists()


def test_what_was_changed_after_its_export_is_refused(model: Path, tmp_path: Path) -> None:
    told(model, asked=False, note="")
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with pytest.raises(CheckpointError, match="is not what was exported"):
        run(model, tmp_path / "srv")
    assert deploy.versions(tmp_path / "srv") == []
    assert deploy.current(tmp_path / "srv") is None


def test_a_removed_version_is_never_named_again(model: Path, tmp_path: Path) -> None:
    """Neither by a new version under its name, nor as the one to go back to."""
    to = tmp_path / "srv"
    run(model, to)
    run(model, to)
    shutil.rmtree(to / "v2")  # current
    run(model, to)
    assert deploy.current(to) == "v3"
    assert json.loads((to / "v3" / deploy.NOTE).read_text())["before"] is None
    with pytest.raises(ConfigError, match="nothing was current before v3"):
        run(None, to, rollback=True)


def test_going_back_to_itself_is_refused(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "srv"
    run(model, to)
    note = to / "v1" / deploy.NOTE
    note.write_text(json.dumps(json.loads(note.read_text()) | {"before": "v1"}))
    with pytest.raises(ConfigError, match="names itself"):
        run(None, to, rollback=True)


@pytest.mark.parametrize(
    "body",
    [
        {"files": None},
        {"files": []},
        {"gate": 3},
        {"gate": {"asked": True, "lines": None}},
        {"gate": {"asked": True, "lines": [{}]}},
    ],
    ids=str,
)
def test_a_malformed_note_is_said(body: object, model: Path, tmp_path: Path) -> None:
    to = tmp_path / "srv"
    run(model, to)
    run(model, to)
    (model / "rein_export.json").write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"rein_export.json: is not as export writes it"):
        run(model, to)
    (to / "v1" / deploy.NOTE).write_text(json.dumps(body))
    first, second = run(None, to, listed=True)
    assert first.startswith("v1  ")
    assert ("gate: not readable" in first) == ("gate" in str(body))
    assert second.endswith("<- current")
    (to / "v1" / deploy.NOTE).write_text("[")
    assert "cannot be read" in run(None, to, listed=True)[0]


def test_one_deploy_at_a_time(model: Path, tmp_path: Path) -> None:
    to = tmp_path / "srv"
    run(model, to)
    code = "import sys,time; from pathlib import Path; from rein.runtime.lock import held\n"
    code += "with held(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(to)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=rf"--to: .* is in use by process {holder.pid}"):
            run(model, to)
    finally:
        holder.kill()
        holder.communicate()
    run(model, to)
    assert deploy.versions(to) == ["v1", "v2"]
    with held(to):  # looking is always allowed
        assert len(run(None, to, listed=True)) == 2


def test_a_full_disk_leaves_current_as_it_was(model: Path, tmp_path: Path, full_disk: object) -> None:
    to = tmp_path / "srv"
    run(model, to)
    with full_disk(20_000), pytest.raises(CheckpointError, match="cannot be written"):  # type: ignore[operator]
        run(model, to)
    assert deploy.versions(to) == ["v1"]
    assert sorted(path.name for path in to.iterdir()) == ["current", "v1"]


def test_the_command_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "srv"
    assert cli.main(["deploy", str(model), "--to", str(to)]) == 0
    assert cli.main(["deploy", "--to", str(to), "--list"]) == 0
    assert "gate: not asked" in capsys.readouterr().out
    for words, code, said in (
        (["--list"], 2, "--to is missing"),
        (["--to", str(to)], 2, "give a model folder, or --rollback, or --list"),
        (["--to", str(to), "--rollback"], 2, "nothing was current before v1"),
        ([str(to), "--to", str(to)], 6, "has no config.json"),
    ):
        assert cli.main(["deploy", *words]) == code
        assert said in capsys.readouterr().err


KILLED = """
import os, sys
from rein.commands import deploy
from rein.tracking.console import Console
print("ready", flush=True)
sys.stdin.readline()
while True:
    deploy.run(sys.argv[1], sys.argv[2], Console(quiet=True), rollback=False, listed=False)
    deploy.run(None, sys.argv[2], Console(quiet=True), rollback=True, listed=False)
"""


@pytest.mark.slow
def test_current_names_a_whole_model_whenever_a_deploy_is_killed(model: Path, tmp_path: Path) -> None:
    """Deploys and rollbacks without end, killed 50 times; REIN_TEST_SEED=N draws other moments."""
    rng = random.Random(int(os.environ.get("REIN_TEST_SEED", "0")))
    to = tmp_path / "srv"
    run(model, to)
    spare, left = None, set[str]()
    for _ in range(KILLS):
        process = spare or looping(model, to)
        spare = looping(model, to)  # is imported while the other works
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        time.sleep(rng.uniform(0, 0.12))
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
        now = deploy.current(to)
        assert now is not None
        refuse_unwhole(to / "current")
        for name in deploy.versions(to):  # `current` among them
            deploy.verify(to / name)
            refuse_unwhole(to / name)
        assert now in deploy.versions(to)
        assert len(run(None, to, listed=True)) == len(deploy.versions(to))
        left |= {path.name.split(".")[1] for path in to.iterdir() if path.name.startswith(".")}
        for name in deploy.versions(to)[:-3]:
            if name != now and name != json.loads((to / now / deploy.NOTE).read_text())["before"]:
                shutil.rmtree(to / name)
    assert spare is not None
    spare.kill()
    spare.communicate()
    assert len(left) > 3  # kills came amid the work: locks, and drafts of versions
    run(model, to)
    assert not [path.name for path in to.iterdir() if path.name.startswith(".")]


def looping(model: Path, to: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(model), str(to)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process
