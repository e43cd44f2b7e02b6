"""The page: what it shows, that it needs no network, and that nothing a model says becomes markup."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from rein.report import charts
from rein.report.evaluation import outcome
from rein.report.html import MOST_SAMPLES, Page, changed, render, samples
from rein.report.text import LONGEST_TEXT

HOSTILE = (
    "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)> &lt; ‮fdsa \x00\x1b[31m 😀 \ud800"
)


def side(score: float, **more: Any) -> dict[str, Any]:
    shape = {"response_length": 30.0, "repetition": 0.01, "truncated": 0.0}
    return (
        {"accuracy": score, "n": 500, "score": score, "accuracy_ci95": [score - 0.04, score + 0.04]}
        | shape
        | more
    )


def evaluation(low: float = 0.36, high: float = 0.46) -> dict[str, Any]:
    return {
        "before": side(0.43, **{"pass@1": 0.4, "pass@8": 0.8}),
        "after": side(0.84, **{"pass@1": 0.7, "pass@8": 0.9}),
        "lift": 0.41,
        "lift_ci95": [low, high],
        "n": 500,
        "by_data_source": {},
    }


def answer(before: float, after: float, text: str = "#605", **columns: Any) -> dict[str, Any]:
    said = {"before": text, "after": text, "before_score": before, "after_score": after}
    return {"prompt": "347+258=", "ground_truth": "605", **said, **columns}


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text inside <pre>."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "pre":
            self.in_pre = True
            self.texts.append("")

    def handle_endtag(self, tag: str) -> None:
        self.in_pre = self.in_pre and tag != "pre"

    def handle_data(self, data: str) -> None:
        if self.in_pre:
            self.texts[-1] += data


def parsed(page: Page) -> Elements:
    elements = Elements()
    elements.feed(render(page))
    return elements


def test_the_outcome_and_its_interval_come_first() -> None:
    page = render(Page("demo", evaluation=evaluation()))
    body = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", page.partition("<main>")[2].partition("<script")[0]))
    assert "Better 43.0 % → 84.0 %" in body
    assert "Lift +41.0 points, 95 % interval +36.0 to +46.0" in body
    assert body.index("Lift") < body.index("Before and after") < body.index("pass@8")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.01, 0.2, "Better"),
        (-0.01, 0.2, "No proven change"),
        (-0.2, -0.01, "Worse"),
        (0.0, 0.0, "No proven change"),
    ],
)
def test_better_is_said_only_where_the_interval_is_above_zero(low: float, high: float, verdict: str) -> None:
    found = outcome(evaluation(low, high))
    assert found is not None
    assert found["verdict"] == verdict
    assert all(0 <= found["place"][name] <= 100 for name in ("low", "high", "zero"))


def test_scores_that_are_no_accuracy_are_shown_as_scores() -> None:
    made = evaluation()
    for name in ("before", "after"):
        made[name] = side(1.5) | {"accuracy": None}
    page = render(Page("demo", evaluation=made))
    assert "Mean score on 500 prompts" in page
    assert "150.0 %" not in page


def test_hostile_model_output_is_text() -> None:
    rows = [answer(0, 1, HOSTILE, prompt=HOSTILE, ground_truth=HOSTILE)]
    manifests = {"sft": {"rows": {"in": 1, "rejected": 0}, "versions": {HOSTILE: HOSTILE}}}
    settings = {"score": {"reward": HOSTILE}}
    found = parsed(
        Page(HOSTILE, evaluation=evaluation(), answers=rows, manifests=manifests, settings=settings)
    )
    assert [tag for tag, _ in found.tags].count("script") == 4
    assert not [tag for tag, _ in found.tags if tag == "img"]
    assert not [name for _, attributes in found.tags for name in attributes if name.startswith("on")]
    said = [text for text in found.texts if "alert(1)" in text]
    assert len(said) == 4  # prompt, before, after, settings
    assert said[0].startswith("</pre></script><script>alert(1)</script>")
    assert "\x00" not in "".join(said)
    render(Page("demo", answers=rows)).encode("utf-8")


def test_metrics_cannot_end_the_script_they_are_in() -> None:
    lines = [{"number": 1, "val/score": 0.5}]
    page = render(Page("demo", metrics={"train": lines}))
    block = page.partition('id="charts">')[2].partition("</script>")[0]
    assert "<" not in block
    assert json.loads(block)["train"][0]["lines"][0]["y"] == [0.5]


def test_the_page_loads_nothing_and_runs_only_its_own_scripts() -> None:
    page = render(Page("demo", evaluation=evaluation()))
    found = Elements()
    found.feed(page)
    policy = next(a["content"] for tag, a in found.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    nonce = re.search(r"'nonce-([\w-]+)'", policy)
    assert nonce is not None
    running = [a for tag, a in found.tags if tag == "script" and a.get("type") != "application/json"]
    assert [a["nonce"] for a in running] == [nonce.group(1)] * 2
    assert not [a for _, a in found.tags if "src" in a]
    assert all((a["href"] or "").startswith("#") for tag, a in found.tags if tag == "a")
    assert render(Page("demo", evaluation=evaluation())).count(nonce.group(1)) == 0


def test_a_page_without_any_stage_but_one_still_opens() -> None:
    page = render(Page("demo", metrics={"sft": [{"number": 1, "train/loss": 2.0}]}))
    assert "Not evaluated" in page
    assert "Fine-tuning" in page
    assert 'id="answers"' not in page


def test_rows_of_every_stage_are_counted_on_the_page() -> None:
    manifests = {
        "rollout": {"rows": {"in": 400, "rejected": 0, "trajectories": 3200}, "seconds": 7.04},
        "train": {"rows": {"in": 3200, "rejected": 16, "held_out": 160, "trained": 3024}, "seconds": 3700},
    }
    text = re.sub(r"<[^>]+>", " ", render(Page("demo", manifests=manifests)).partition("<script")[0])
    for piece in ("3,200 trajectories", "160 held out", "3,024 trained", "0.50 %", "7.0 s", "1 h 01 min"):
        assert piece in text


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    lines = [{"number": n, "critic/vf_explained_var": None if n == 2 else n / 10} for n in range(4)]
    drawn = charts.draw("train", lines)
    assert [chart["title"] for chart in drawn] == ["Critic: explained variance"]
    assert drawn[0]["lines"][0]["x"] == [0, 1, 3]
    assert "Not finite and not drawn: 1." in drawn[0]["sentence"]


def test_long_curves_are_thinned_without_losing_a_spike() -> None:
    points = [(n, 0.0) for n in range(50_000)]
    points[31_415] = (31_415, 9.0)
    points[2_718] = (2_718, -9.0)
    kept = charts.thinned(points)
    assert len(kept) <= charts.MOST_POINTS
    assert (31_415, 9.0) in kept
    assert (2_718, -9.0) in kept
    assert [n for n, _ in kept] == sorted({n for n, _ in kept})


def test_the_answers_that_moved_are_shown_and_long_ones_cut() -> None:
    rows = [answer(1, 1) for _ in range(200)] + [answer(0, 1, "up"), answer(1, 0, "x" * 10_000)]
    shown = samples(rows)
    assert len(shown) == 2 + MOST_SAMPLES // 3
    assert [s["word"] for s in shown[:3]] == ["better", "worse", "same"]
    assert len(shown[1]["after"]) < LONGEST_TEXT + 50
    assert shown[1]["after"].endswith("(6000 more characters)")


def test_only_settings_that_differ_from_the_defaults_are_listed() -> None:
    usual = {"seed": 0, "actor": {"clip_ratio": 0.2, "optim": {"lr": 1e-6}}}
    mine = {"seed": 0, "actor": {"clip_ratio": 0.2, "optim": {"lr": 1e-4}}}
    assert changed(mine, usual) == [("actor.optim.lr", "0.0001")]
