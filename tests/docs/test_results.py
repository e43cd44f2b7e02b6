"""The numbers of README and docs are those that the benchmark scripts wrote."""

import json
import re
from pathlib import Path

import pytest
from docs_read import PAGES, ROOT, name_of, text_of, without_blocks

RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = ("demo_controls", "stability", "update")
PRINTED = [
    (name_of(page), name, text)
    for page in PAGES
    for name, text in re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", text_of(page), re.DOTALL)
    if name in SCRIPTS
]
CITED = re.compile(r"`benchmarks/results/(\w+)\.md`")
DECIMAL = re.compile(r"(?<![\w.:/])\d+\.\d+(?![\w.:]|\.\d)")
# Decimals beside a citation that are no result: limits, versions, defaults.
NO_RESULTS = {"0.1", "0.6", "0.5", "2.0"}


def test_the_pages_print_results() -> None:
    assert sorted(name for _, name, _ in PRINTED) == sorted(SCRIPTS)


@pytest.mark.parametrize(("page", "name", "text"), PRINTED, ids=[name for _, name, _ in PRINTED])
def test_a_printed_result_is_what_its_script_wrote(page: str, name: str, text: str) -> None:
    result = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert text.strip()
    assert text.strip() in result


def units(text: str) -> list[str]:
    """Paragraphs, bullets, table rows."""
    found: list[str] = []
    for part in re.split(r"\n\s*\n", without_blocks(text)):
        lines = part.splitlines()
        for line in lines:
            if (
                not found
                or line.startswith(("|", "- ", "* ", "#"))
                or re.match(r"\d+\. ", line)
                or line is lines[0]
            ):
                found.append(line)
            else:
                found[-1] += " " + line
    return found


CLAIMS = [(name_of(page), unit) for page in PAGES for unit in units(text_of(page)) if CITED.search(unit)]


def test_pages_cite_results() -> None:
    assert len(CLAIMS) > 20


@pytest.mark.parametrize(("page", "unit"), CLAIMS, ids=[f"{page}: {unit[:40]}" for page, unit in CLAIMS])
def test_a_decimal_beside_a_cited_result_stands_in_it(page: str, unit: str) -> None:
    cited = CITED.findall(unit)
    there = "".join((RESULTS / f"{name}.md").read_text(encoding="utf-8") for name in cited)
    there += "".join(
        shown(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))) for name in cited
    )
    missing = [number for number in DECIMAL.findall(unit) if number not in there and number not in NO_RESULTS]
    assert not missing, f"{page}: {missing} are not in {cited}: {unit}"


def shown(value: object) -> str:
    return json.dumps(value)


def test_every_cited_result_is_there() -> None:
    for page in PAGES:
        for name in CITED.findall(text_of(page)):
            assert Path(RESULTS / f"{name}.md").is_file(), f"{name_of(page)}: {name}"
