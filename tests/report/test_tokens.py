"""Trajectories on the page: bounded, finite, and text only."""

import json

from page_made import record, whole_page

from rein.report.html import Page, render
from rein.report.tokens import MOST_BATCHES, MOST_ROWS, MOST_TOKENS, section, spread, visible


def test_nothing_is_drawn_of_no_records() -> None:
    assert section([]) is None
    assert 'id="tokens"' not in render(Page("demo"))


def test_batches_rows_and_tokens_are_bounded() -> None:
    found = section([record(batch, n, 3 * MOST_TOKENS) for batch in range(9) for n in range(12)])
    assert found is not None
    assert len(found["batches"]) == MOST_BATCHES
    assert [found["batches"][i]["batch"] for i in (0, -1)] == [1, 9]
    for batch in found["batches"]:
        assert len(batch["rows"]) == MOST_ROWS
        assert all(len(row["tokens"]) == len(row["log_ratio"]) == MOST_TOKENS for row in batch["rows"])
        assert all(row["left_out"] == 2 * MOST_TOKENS for row in batch["rows"])
    assert spread(range(100))[0] == 0
    assert spread(range(100))[-1] == 99


def test_numbers_are_those_of_the_record() -> None:
    row = record(0, 3)
    found = section([row])
    assert found is not None
    (drawn,) = found["batches"][0]["rows"]
    for i, counts in enumerate(row["response_mask"]):
        gap = row["old_log_probs"][i] - row["reference_log_probs"][i]
        assert drawn["log_ratio"][i] == (round(gap, 4) if counts else 0)
        assert (i in drawn["off"]) is not counts
    assert [kind["name"] for kind in found["kinds"]] == ["Log-ratio", "Advantage", "KL", "Value"]


def test_what_is_not_known_has_no_switch() -> None:
    row = record(0, 3) | {"values": None, "reference_log_probs": None, "kl": None}
    found = section([row])
    assert found is not None
    assert [kind["name"] for kind in found["kinds"]] == ["Advantage"]


def test_numbers_that_are_not_finite_become_null() -> None:
    found = section([record(0, 3) | {"values": [float("nan")] * 60, "advantages": [float("inf")] * 60}])
    assert found is not None
    json.dumps(found, allow_nan=False)
    assert [kind["name"] for kind in found["kinds"]] == ["Log-ratio", "KL"]


def test_text_that_turns_or_ends_something_is_made_plain() -> None:
    assert visible("\u202eabc\u2069") == "⟨202E⟩abc⟨2069⟩"
    assert visible("\x00\ud800") == "\ufffd?"
    assert visible("w" * 999) == "w" * 64 + "…"
    page = render(whole_page())
    assert "</script><script>document" not in page
    page.encode("utf-8")
