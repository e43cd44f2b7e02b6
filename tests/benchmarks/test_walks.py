"""The random-walks benchmarks: their scores are exact, and a whole small benchmark runs to its report."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import random_walks
import results_io
import staleness
import walks
import walks_run
from walks import GOAL, AtRandom, exact, make_graph, sample

from rein.data.groups import pairs


def test_every_node_of_a_graph_leads_to_the_goal_and_a_seed_gives_one_graph() -> None:
    graph = make_graph(3)
    assert torch.equal(graph.edges, make_graph(3).edges)
    assert graph.edges[GOAL:].any(1).all()
    assert (graph.best[GOAL + 1 :] < walks.MOVES).all()


def test_the_exact_score_is_what_sampled_walks_score_on_average() -> None:
    graph = make_graph(0)
    rows, invalid = sample(AtRandom(graph), graph, 4000, seed=1)
    scores = torch.tensor([row.score for row in rows], dtype=torch.float64)
    error = scores.std().item() / len(scores) ** 0.5
    found = exact(AtRandom(graph), graph)
    assert found["val/score"] == pytest.approx(scores.mean().item(), abs=4 * error)
    assert found["val/invalid"] == pytest.approx(0, abs=1e-9) == invalid
    assert found["val/pruned"] < 0.01


def test_a_walk_along_the_shortest_way_scores_one_and_each_move_more_costs() -> None:
    graph = make_graph(0)
    rows, _ = sample(AtRandom(graph), graph, 500, seed=2)
    for row in rows:
        reached, fewest = row.response_ids[-1] == GOAL, graph.best[row.prompt_ids[0]].item()
        wanted = (walks.MOVES - len(row.response_ids)) / (walks.MOVES - fewest) if reached else 0.0
        assert row.score == pytest.approx(wanted)


def test_a_small_benchmark_trains_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(walks_run.SHORT, walks=60, mini=30, updates=2, sft_batch=30, sft_steps=3, fit_steps=2)
    methods = ["filtered cloning (top 25 %)", "decoupled PPO (default)"]
    monkeypatch.setattr(random_walks, "TASKS", {"short": small})
    monkeypatch.setattr(random_walks, "TUNING", {"short": (0,)})
    monkeypatch.setattr(random_walks, "FRESH", {"short": (1, 2)})
    monkeypatch.setattr(random_walks, "RATES", (1e-3,))
    for module in (random_walks, results_io):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    random_walks.tune(small, tmp_path, methods)
    random_walks.fresh(small, tmp_path, (1, 2), methods)
    random_walks.report(tmp_path)
    found = json.loads((tmp_path / "results" / "random_walks.json").read_text())
    assert [row["updates"] for row in found["rows"]] == [2, 2, 2, 2]
    assert all(0 <= row["final"] <= row["best"] <= 1 for row in found["rows"])
    assert (tmp_path / "results" / "random_walks.svg").read_text().startswith("<svg")
    before = (tmp_path / "short1" / "runs.jsonl").read_text()
    random_walks.fresh(small, tmp_path, (1,), methods)
    assert (tmp_path / "short1" / "runs.jsonl").read_text() == before, "what is done is not repeated"


def test_small_stale_data_are_trained_on_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(staleness.TASK, walks=40, mini=20, updates=2, sft_batch=20, sft_steps=2, fit_steps=2)
    for name, value in {"TASK": small, "AGES": (0, 2), "STEPS": 2, "GRAPHS": (0,)}.items():
        monkeypatch.setattr(staleness, name, value)
    for module in (staleness, results_io):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    staleness.train_all(tmp_path, (0,), ["TOPR"])
    staleness.report(tmp_path)
    found = json.loads((tmp_path / "results" / "staleness.json").read_text())
    assert [row["age"] for row in found["rows"]] == [0, 2]
    ess, distance = found["settings"]["begun"]["ESS"], found["settings"]["begun"]["KL from start to behavior"]
    assert ess[0] == pytest.approx(1, abs=1e-3)
    assert distance[0] == pytest.approx(0, abs=1e-6)
    assert distance[1] > distance[0], "data of age 0 are the start policy's own"


def test_pairs_are_of_one_start_node() -> None:
    rows, _ = sample(AtRandom(make_graph(0)), make_graph(0), 100, seed=3)
    both = pairs(rows)
    assert all(a.group == b.group and a.score > b.score for a, b in zip(both[::2], both[1::2], strict=True))
