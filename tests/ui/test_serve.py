"""The command: a folder, a port, an end in order."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from runs_made import make_run

from rein import cli
from rein.errors import ConfigError
from rein.ui.serve import is_loopback, listener

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_pages_are_served_until_a_signal_which_ends_in_order(
    tmp_path: Path, number: int, no_proxy: None
) -> None:
    make_run(tmp_path / "first")
    command = [sys.executable, "-u", "-m", "rein", "ui", str(tmp_path), "--port", "0"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert address
        with urllib.request.urlopen(f"{address[0]}/", timeout=60) as answer:
            assert b"1 of 1 runs" in answer.read()
        time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(60) == 0
        rest = process.stdout.read()
    assert "Traceback" not in rest
    assert "ui: ended" in rest


def test_a_port_in_use_is_said_and_nothing_is_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["ui", str(tmp_path), "--port", str(port)]) == 2
    assert f"{port} is in use; give another --port, or --port 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nothere"], "/nothere is no folder"),
        ([".", "--port", "x"], "x is no port"),
        ([".", "--port", "70000"], "70000 is no port"),
        ([".", "--host", "203.0.113.9", "--port", "0"], "203.0.113.9"),
    ],
)
def test_wrong_use_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ui", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_its_packages_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["ui", str(tmp_path)]) == 2
    assert "pip install 'rein[ui]'" in capsys.readouterr().err


def test_loopback_is_told_from_what_others_reach() -> None:
    with listener("127.0.0.1", 0) as own, listener("0.0.0.0", 0) as open_to_all:
        assert is_loopback(own)
        assert not is_loopback(open_to_all)
    with pytest.raises(ConfigError, match="no address"):
        listener("nothere.invalid", 0)


def test_the_command_is_light_until_it_runs() -> None:
    code = "import sys, rein.commands.ui; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, env=os.environ
    )
    assert not {"starlette", "uvicorn", "torch", "plotly"} & set(done.stdout.split())
