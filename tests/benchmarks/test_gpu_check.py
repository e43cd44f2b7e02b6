"""The check of a GPU runs through on a CPU, as far as its own code goes, and says where there is no GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.mark.long
def test_every_line_of_the_table_is_made() -> None:
    script = [sys.executable, str(BENCHMARKS / "gpu_check.py"), "--cpu", "--tiny"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    lines = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert lines[2:] == ["update, exact", "generation, exact", "update, fast", "generation, fast"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a GPU")
def test_without_a_gpu_nothing_is_checked_and_that_is_said() -> None:
    done = subprocess.run(
        ["sh", str(BENCHMARKS / "gpu_check.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "finds no GPU here; nothing was checked" in done.stderr
