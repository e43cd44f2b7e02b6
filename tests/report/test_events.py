"""What the page says of guards: every event in order, counted once, as text and never as markup."""

import json
import re
from typing import Any

import pytest

from rein.report.events import MOST_EVENTS, events, section
from rein.report.html import Page, render

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)>\n<a href='javascript:1'> \x1b[31m \ud800"
)


def verdict(number: int, rule: str, action: str, **more: Any) -> dict[str, Any]:
    facts = {"metric": "probe/kl_reference", "value": 0.31, "limit": 0.3}
    said = {"reason": "probe/kl_reference 0.31 is above 0.3", "changed": {}}
    return (
        {"seq": 1, "kind": "verdict", "number": number, "rule": rule, "action": action} | facts | said | more
    )


def rollback(number: int, to: int) -> dict[str, Any]:
    return {"kind": "rollback", "number": number, "reason": f"back to update {to}", "from": number, "to": to}


RUN = [
    verdict(14, "moved_too_far", "stop_epochs", changed={"lr": [1.0, 0.5]}),
    verdict(16, "kl_high", "rollback", changed={"lr": [0.5, 0.15], "kl_coef": [1.0, 1.5]}),
    rollback(16, 0),
    verdict(20, "not_finite", "skip"),
    verdict(20, "actor_spike", "skip"),
    verdict(21, "actor_spike", "skip", changed={"reward_clip": [None, [-2.0, 2.0]]}),
    verdict(30, "heavy_tail", "alert"),
    verdict(32, "kl_soft", "soften", changed={"kl_coef": [1.5, 2.0]}),
    verdict(40, "score_fell", "rollback_to_best", changed={"kl_coef": [2.0, 2.25]}),
    rollback(40, 24),
    {"kind": "decay", "number": 64, "reason": "5 healthy probes", "changed": {"kl_coef": [2.25, 1.0]}},
]


def body_of(page: Page) -> str:
    return render(page).partition("<main>")[2].partition("<script")[0]


def test_a_rollback_is_one_event_with_the_verdict_that_asked_for_it() -> None:
    found = events(RUN)
    assert [(e.number, e.rule, e.action, e.back) for e in found[:2]] == [
        (14, "moved_too_far", "stop_epochs", None),
        (16, "kl_high", "rollback", 0),
    ]
    assert found[1].seen == "probe/kl_reference 0.31 is above 0.3"
    assert found[1].changed == "learning rate x0.5 → x0.15, KL coefficient x1 → x1.5"
    assert [e.back for e in found if e.back is not None] == [0, 24]
    assert len(found) == len(RUN) - 2


def test_the_sentence_counts_events_and_says_what_holds_at_the_end() -> None:
    assert section(RUN)["outcome"] == (
        "2 rollbacks, 2 updates skipped, 1 batch cut short, 1 softening, 1 alert, "
        "learning rate now x0.15, reward clip now -2 to 2."
    )


def test_a_run_without_events_says_so_and_a_page_without_training_says_nothing() -> None:
    assert "No guard fired." in body_of(Page("demo", journal=[]))
    assert "<table" not in body_of(Page("demo", journal=[]))
    assert 'id="guards"' not in body_of(Page("demo"))


def test_rows_that_are_left_out_are_counted_once() -> None:
    lines = [verdict(n, "mine", "skip", excluded=["a", "b", f"c{n}"]) for n in (1, 2)]
    assert events(lines)[0].changed == "3 rows left out"
    assert section(lines)["outcome"].endswith("4 rows left out.")


def test_every_event_is_on_the_page_in_order() -> None:
    text = re.sub(r"<[^>]+>", " ", body_of(Page("demo", journal=RUN)))
    rows = ("moved_too_far", "x1 → x0.5", "kl_high", "x0.5 → x0.15", "5 healthy probes", "relaxed")
    places = [text.index(piece, text.index("Back to")) for piece in rows]
    assert places == sorted(places)


def test_of_very_many_events_the_alerts_are_left_out_first_and_the_rest_counted() -> None:
    lines = [verdict(n, "heavy_tail", "alert") for n in range(1000)]
    lines += [verdict(1000, "kl_high", "rollback"), rollback(1000, 900)]
    found = section(lines)
    assert len(found["events"]) == MOST_EVENTS
    assert found["events"][-1].back == 900
    assert found["left_out"] == 801
    assert "801 more" in body_of(Page("demo", journal=lines))


def test_curves_are_marked_once_for_an_update_and_paler_where_they_were_undone() -> None:
    found = section(RUN)
    assert [(mark["x"], mark["kind"], mark["label"]) for mark in found["marks"]] == [
        (14, "action", ""),
        (16, "rollback", "back to 0"),
        (20, "action", ""),
        (21, "action", ""),
        (30, "alert", ""),
        (32, "alert", ""),
        (40, "rollback", "back to 24"),
        (64, "alert", ""),
    ]
    assert found["undone"] == [[0, 16], [24, 40]]
    words = found["marks"][1]["text"].replace("<br>", " ")
    assert words.startswith(
        "kl_high: probe/kl_reference 0.31 is above 0.3: rollback, back to 0; learning rate"
    )
    block = render(Page("demo", journal=RUN)).partition('id="charts">')[2].partition("</script>")[0]
    assert json.loads(block)["guards"] == {name: found[name] for name in ("marks", "undone")}


def test_hostile_text_of_a_users_rule_is_text_in_the_table_and_on_the_curves() -> None:
    lines = [
        verdict(1, HOSTILE, HOSTILE, reason=HOSTILE, metric=HOSTILE, changed={HOSTILE: [HOSTILE, HOSTILE]}),
        verdict(2, HOSTILE, "rollback", excluded=[HOSTILE], value=HOSTILE, limit=[HOSTILE]),
        rollback(2, 0),
    ]
    page = render(Page("demo", journal=lines))
    assert not re.search(r"<(img|a href='javascript)", page.partition("<main>")[2].partition("<script")[0])
    assert page.partition("<main>")[2].partition("<script")[0].count("<script") == 0
    block = page.partition('id="charts">')[2].partition("</script>")[0]
    assert "<" not in block
    for mark in json.loads(block)["guards"]["marks"]:
        assert "<" not in mark["text"].replace("<br>", "")
        assert "\x1b" not in mark["text"]
    page.encode("utf-8")


def test_a_long_reason_is_cut() -> None:
    (event,) = events([verdict(1, "mine", "alert", reason="x" * 10_000)])
    assert len(event.seen) <= 300


def test_what_a_rule_saw_is_said_where_its_reason_does_not() -> None:
    (event,) = events([verdict(1, "mine", "pause", reason="enough", value="nan")])
    assert event.seen == "enough; probe/kl_reference nan, limit 0.3"


@pytest.mark.parametrize(
    "line",
    [{}, {"kind": None}, {"kind": "rollback", "from": "1", "to": None}, {"kind": "later", "number": "7"}],
)
def test_a_line_that_is_not_known_is_shown_as_far_as_it_goes(line: dict[str, Any]) -> None:
    assert len(section([line])["events"]) == 1
    render(Page("demo", journal=[line]))


def test_out_of_memory_is_an_event_too() -> None:
    line = {
        "kind": "out_of_memory",
        "number": 3,
        "reason": "can't allocate memory",
        "changed": {"token_budget": [1.0, 0.5]},
    }
    assert section([line])["outcome"] == "1 time out of memory, token budget now x0.5."
