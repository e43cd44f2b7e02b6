"""`rein train` in a real terminal: stopped by Ctrl-C, gone on with, and beside the same run piped."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rows_made import random_trajectories

from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row

pytest.importorskip("pyte", reason="pyte reads the screen; run make setup")
from screen import in_terminal

pytestmark = pytest.mark.long

TIMED = re.compile(r" \(/.*|[\d.]+(e-\d+)?|speed.*|time.*|phases.*")  # what no two runs share


def without_numbers(text: str) -> list[str]:
    return [TIMED.sub("#", line) for line in text.splitlines()]


def words_of(model: str, folder: Path, out: str) -> list[str]:
    rule = "[{name: watched, metric: probe/kl_reference, above: -1.0, then: [{lr: 0.5}]}]"
    given = f"""
        model.path={model} data.train_files={folder}/rows.parquet data.holdout_fraction=0.3
        data.max_response_length=9 data.train_batch_size=4 actor.ppo_mini_batch_size=2 actor.ppo_epochs=2
        trainer.critic_warmup=2 threads=1 trainer.total_training_steps=12 trainer.test_freq=4
        score.reward=length out={folder}/{out} cache={folder}/cache-{out}
    """.split()
    return [sys.executable, "-m", "rein", "train", *given, f"guards.rules={rule}"]


def test_a_run_is_seen_stopped_gone_on_with_and_says_what_it_says_when_piped(
    tiny_lm: str, tmp_path: Path
) -> None:
    rows = [trajectory_row(row.with_score(float(i))) for i, row in enumerate(random_trajectories(24))]
    write_rows(tmp_path / "rows.parquet", rows, TRAJECTORIES, {})
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    piped = subprocess.run(
        words_of(tiny_lm, tmp_path, "piped"), env=env, capture_output=True, text=True, timeout=900
    )
    assert piped.returncode == 0, piped.stderr
    assert "\x1b" not in piped.stdout
    screen, process = in_terminal(words_of(tiny_lm, tmp_path, "seen"), 300)
    screen.until(lambda text: re.search(r"train ━+─* +[1-9]\d/", text), 600)
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130, screen.text
    screen.join()
    first = screen.text
    assert "state saved" in first
    assert screen.cursor == (len(screen.lines), True)
    screen, process = in_terminal(words_of(tiny_lm, tmp_path, "seen"), 300)
    assert process.wait(600) == 0, screen.text
    screen.join()
    second = screen.text
    for name in ("probe/kl_reference", "probe/entropy", "actor/pg_clipfrac", "critic/vf_explained_var"):
        assert len(re.findall(rf"^{name} +[-.\de]+  .*[▁-█]", second, re.MULTILINE)) == 1, second
    assert "softened: lr x0.01" in second
    seen = set(without_numbers(first) + without_numbers(second))
    lost = [line for line in without_numbers(piped.stdout) if line not in seen and " eta " not in line]
    assert not lost, (lost, first, second)
