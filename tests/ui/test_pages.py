"""What the pages say of runs: states, outcomes, curves that follow the file, settings that differ."""

import json
import os
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs_made import EVALUATION, HOSTILE, make_run, metrics_line, write
from starlette.testclient import TestClient

Page = Callable[..., str]


def lock(run: Path, pid: int, host: str | None = None, since: float | None = None) -> None:
    who = {"pid": pid, "host": host or socket.gethostname(), "since": round(since or time.time())}
    write(run / ".lock", who)


def state(page: Page, name: str) -> str:
    found = re.search(r'<span class="tag \w+">(\w+)</span>', page(f"/run?name={name}"))
    assert found
    return found[1]


def event(number: int, kind: str, **more: object) -> str:
    return json.dumps({"seq": number, "number": number, "kind": kind, **more}) + "\n"


def test_the_list_shows_every_run_with_its_outcome(tmp_path: Path, page: Page) -> None:
    for name in ("first", "deep/er/second"):
        make_run(tmp_path / "runs" / name)
    text = page("/")
    assert "2 of 2 runs" in text
    assert text.count("+50.0 points") == 2
    assert text.count("<polyline") == 2
    assert "deep/er/second" in text


def test_a_folder_without_runs_says_what_a_run_is(page: Page) -> None:
    assert "No runs here yet" in page("/")


def test_the_folder_itself_may_be_the_run(tmp_path: Path, page: Page) -> None:
    make_run(tmp_path / "runs")
    assert '/run?name=."' in page("/")
    assert "+50.0 points" in page("/run?name=.")


def test_states(tmp_path: Path, page: Page) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "done")
    failed = make_run(runs / "failed", done=["train"])
    assert (state(page, "done"), state(page, "failed")) == ("done", "failed")
    assert "evaluate did not finish" in page("/run?name=failed")
    lock(failed, os.getpid())
    assert state(page, "failed") == "running"
    lock(failed, os.getpid(), since=time.time() - 10**9)  # its number is another process's now
    assert state(page, "failed") == "killed"
    lock(failed, 2**22 + 5)
    assert state(page, "failed") == "killed"
    lock(failed, 1, host="elsewhere")
    assert state(page, "failed") == "running"
    stopped = make_run(runs / "stopped", done=[])
    (stopped / "train" / "snapshots" / "step-5").mkdir(parents=True)
    assert state(page, "stopped") == "paused"
    paused = make_run(runs / "paused", done=[])
    write(paused / "train" / "journal.jsonl", event(1, "end", action="pause", reason="kl_high thrice"))
    assert state(page, "paused") == "paused"
    assert "kl_high thrice" in page("/")


def test_the_list_is_sorted_and_searched(tmp_path: Path, page: Page) -> None:
    for name, updates in (("b", 3), ("a", 9), ("c", 1)):
        make_run(tmp_path / "runs" / name, updates=updates)

    def order(address: str) -> list[str]:
        return re.findall(r'name=(\w+)"><bdi>', page(address))

    assert order("/") == ["a", "b", "c"]
    assert order("/?sort=updates&order=down") == ["a", "b", "c"]
    assert order("/?sort=updates&order=up") == ["c", "b", "a"]
    assert order("/?q=B") == ["b"]
    assert order("/?sort=nonsense") == ["a", "b", "c"]
    assert "None of 3 runs" in page("/?q=zzz")


def test_a_runs_curves_follow_its_metrics(tmp_path: Path, page: Page) -> None:
    run = make_run(tmp_path / "runs" / "a", done=[], updates=3)

    def points() -> list[int]:
        data = page("/run?name=a").partition('id="charts">')[2].partition("</script>")[0]
        found: list[int] = json.loads(data)["charts"]["train"][0]["lines"][0]["x"]
        return found

    assert points() == [1, 2, 3]
    with (run / "train" / "metrics.jsonl").open("a") as file:
        file.write(metrics_line(4) + metrics_line(5)[:20])
    assert points() == [1, 2, 3, 4]
    write(run / "train" / "metrics.jsonl", metrics_line(1) + metrics_line(2))  # resumed from 2
    assert points() == [1, 2]


def test_guard_events_are_counted_and_marked(tmp_path: Path, page: Page) -> None:
    run = make_run(tmp_path / "runs" / "a")
    verdict = event(
        2, "verdict", rule="kl_high", action="rollback", reason="too far", changed={"lr": [1.0, 0.3]}
    )
    write(run / "train" / "journal.jsonl", verdict + event(3, "rollback", **{"from": 2, "to": 0}))
    text = page("/run?name=a")
    assert "1 rollback, learning rate now x0.3" in text
    assert '"label": "back to 0"' in text


def test_two_runs_on_the_same_charts_with_the_settings_that_differ(tmp_path: Path, page: Page) -> None:
    make_run(tmp_path / "runs" / "a", settings={"actor": {"optim": {"lr": 1e-6}}, "threads": 1})
    make_run(tmp_path / "runs" / "b", settings={"actor": {"optim": {"lr": 3e-6}}, "threads": 1})
    text = page("/compare?run=a&run=b")
    data = text.partition('id="charts">')[2].partition("</script>")[0]
    lines = json.loads(data)["charts"]["train"][0]["lines"]
    assert [(line["label"], line["color"], line["dash"]) for line in lines] == [("a", 0, 0), ("b", 1, 0)]
    assert "actor.optim.lr" in text
    assert "<code>threads" not in text
    assert text.count("+50.0 points") == 2


@pytest.mark.parametrize(
    "query", ["", "?run=a", "?run=a&run=a", "?" + "&".join(f"run=r{i}" for i in range(7))]
)
def test_too_few_or_too_many_to_compare_are_said(tmp_path: Path, page: Page, query: str) -> None:
    make_run(tmp_path / "runs" / "a")
    assert "choose 2 to 6" in page(f"/compare{query}")


BROKEN = {
    "nothing": "",
    "no json": "{",
    "no object": "[1, 2]",
    "deep": "[" * 200_000,
    "nan": '{"lift": NaN, "lift_ci95": [NaN, Infinity], "before": {}, "after": {}}',
    "strings": '{"lift": "x", "lift_ci95": "ab", "before": "b", "after": [], "n": {}}',
    "huge": '{"lift": 1'
    + "0" * 400
    + ', "lift_ci95": [0, 1], "before": {"score": 1}, "after": {"score": 1}}',
    "bytes": "\ud800",
    "hostile": json.dumps(EVALUATION | {"by_data_source": {HOSTILE: {}, "b": {}}, "n": HOSTILE}),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    "file",
    [
        "evaluate/evaluation.json",
        "recipe.json",
        "train/manifest.json",
        "train/metrics.jsonl",
        "train/journal.jsonl",
        "summary.json",
        ".lock",
    ],
)
def test_whatever_a_file_holds_the_pages_are_there(tmp_path: Path, page: Page, file: str, body: str) -> None:
    run = make_run(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "b")
    write(run / file, body)
    for address in ("/", "/run?name=a", "/compare?run=a&run=b"):
        text = page(address)
        assert "<img" not in text
        assert "alert(1)</script>" not in text
        text.encode("utf-8")


def test_a_broken_file_is_named(tmp_path: Path, page: Page) -> None:
    run = make_run(tmp_path / "runs" / "a")
    write(run / "evaluate" / "evaluation.json", "{")
    assert "evaluate/evaluation.json: is not JSON" in page("/run?name=a")
    assert "evaluate/evaluation.json: is not JSON" in page("/")


def test_hostile_names_are_text(tmp_path: Path, client: TestClient) -> None:
    name = "<img src=x onerror=alert(1)>&'\"%2e%2e"
    make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs" / "b")
    text = client.get("/").text
    assert "<img" not in text
    link = re.search(r'href="(/run\?name=%3C[^"]+)"', text)
    assert link
    assert client.get(link[1].replace("&amp;", "&")).status_code == 200
    both = client.get("/compare", params=[("run", name), ("run", "b")])
    assert both.status_code == 200
    assert "<img" not in both.text
