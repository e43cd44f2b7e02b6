"""A trace of the steps that are asked for, with phases as ranges; of others nothing."""

import json
from pathlib import Path

import torch

from rein.runtime.clock import Clock
from rein.runtime.profiler import Profiler


def test_a_step_s_trace_names_the_clock_s_phases(tmp_path: Path) -> None:
    profiler, clock = Profiler([2], tmp_path / "profile"), Clock()
    clock.marks = profiler.phase
    for number in (1, 2, 3):
        profiler.step(number)
        with clock("update_actor"):
            torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.close()
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["step-2.json"]
    events = json.loads((tmp_path / "profile" / "step-2.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("update_actor") == 1
    assert "aten::mm" in names


def test_the_last_step_s_trace_is_written_at_the_end(tmp_path: Path) -> None:
    profiler = Profiler([1], tmp_path)
    profiler.step(1)
    profiler.close()
    profiler.close()
    assert (tmp_path / "step-1.json").exists()
