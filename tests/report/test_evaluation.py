"""What evaluation.json and the gate say becomes what the page says, each number once and none invented."""

import re

import pytest
from page_made import evaluation, gate, off_policy

from rein.report.evaluation import outcome, parts, stored_answers, wins
from rein.report.gate import section
from rein.report.html import Page, render


def words(page: Page) -> str:
    body = render(page).partition("<main>")[2].partition("<script")[0]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


def test_every_part_of_the_evaluation_is_on_the_page() -> None:
    tables = {table["title"]: table for table in parts(evaluation())}
    assert list(tables) == ["By data source", "By length", "Sampled answers", "The proxy"]
    assert [row["name"] for row in tables["By length"]["rows"]] == ["28 to 29", "30"]
    assert [row["tone"] for row in tables["By data source"]["rows"]] == ["good", "bad"]
    assert [row["name"] for row in tables["Sampled answers"]["rows"]] == ["seed 1", "seed 2", "all"]
    assert "2 seeds" in tables["Sampled answers"]["note"]
    assert "0.0141" in tables["Sampled answers"]["note"]
    for table in tables.values():
        for row in table["rows"]:
            assert 0 <= row["place"]["low"] <= row["place"]["lift"] <= row["place"]["high"] <= 100
            assert 0 <= row["place"]["zero"] <= 100
    assert wins(evaluation()).startswith("Win rate 71.0 % (95 % 68.0 % to 74.0 %)")
    assert "Well-formed answers 98.0 %" in words(Page("demo", evaluation=evaluation()))


def test_an_estimate_that_is_not_trusted_proves_nothing() -> None:
    trusted, refused = outcome(off_policy()), outcome(off_policy("the products are worth 12.5 rows"))
    assert trusted is not None
    assert refused is not None
    assert (trusted["verdict"], refused["verdict"]) == ("Better", "Not to be trusted")
    said = words(Page("demo", evaluation=off_policy("the products are worth 12.5 rows, 50 are needed")))
    assert "Trust is refused" in said
    assert "after: the products are worth 12.5 rows, 50 are needed" in said
    assert "Effective sample size, rows 12.5 12.5 50 or more" in said
    found = stored_answers(off_policy())
    assert found is not None
    assert found["estimates"][0]["cells"][0] == {"value": "0.4", "interval": "0.3 to open"}
    assert "Can be trusted" in words(Page("demo", evaluation=off_policy()))


def test_a_failed_check_says_by_how_much_and_why() -> None:
    found = section(gate("max_kl"))
    assert found is not None
    assert (found["verdict"], found["said"][:22]) == ("Failed", "1 of 3 checks failed; ")
    kl = next(row for row in found["rows"] if row["check"] == "max_kl")
    assert (kl["value"], kl["limit"], kl["margin"]) == ("0.45", "at most 0.3", "+0.15")
    assert kl["why"]
    assert all(not row["why"] for row in found["rows"] if row["passed"])
    forced = section(gate("max_kl") | {"forced": True})
    assert forced is not None
    assert "forced" in forced["said"]


def test_a_gate_that_was_not_asked_has_not_passed() -> None:
    said = words(Page("demo", gate={"asked": False, "note": "gate.enable is false"}))
    assert "Not asked . gate.enable is false" in said
    assert "passed" not in said.partition("Settings")[0]


@pytest.mark.parametrize("value", ["nan", "inf", None])
def test_a_number_that_is_none_has_no_margin(value: str | None) -> None:
    line = {"check": "max_kl", "value": value, "limit": 0.3, "passed": False, "why": "no number"}
    found = section({"asked": True, "lines": [line]})
    assert found is not None
    assert found["rows"][0]["margin"] == "–"
