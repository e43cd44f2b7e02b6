"""The README's numbers are those that the benchmark scripts wrote."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PRINTED = re.findall(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", README, re.DOTALL)


def test_the_readme_prints_results() -> None:
    assert {name for name, _ in PRINTED} == {"demo_controls", "stability", "update"}


@pytest.mark.parametrize(("name", "text"), PRINTED, ids=[name for name, _ in PRINTED])
def test_a_printed_result_is_what_its_script_wrote(name: str, text: str) -> None:
    result = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    assert text.strip()
    assert text.strip() in result
