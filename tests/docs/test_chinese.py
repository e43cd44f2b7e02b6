"""The Chinese pages say what the English ones say: commands, recipes, numbers; and link both ways."""

import re

import pytest
import yaml
from docs_read import ROOT, blocks, commands, text_of, without_blocks

PAIRS = [
    (english, english.with_name(f"{english.stem}.zh.md"))
    for english in (ROOT / "README.md", ROOT / "docs" / "first-ten-minutes.md")
]
WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "seven": 7, "twenty-two": 22}
NUMBER = re.compile(r"(?<![\w.])(?:\d[\d,]*\d|\d)(?:\.\d+)?")
IDS = [english.name for english, _ in PAIRS]


def numbers(text: str) -> set[str]:
    """Of prose and tables: code and links apart, numbered headings without their number."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", without_blocks(text).partition("\n## The code")[0])
    return set(NUMBER.findall(re.sub(r"(?m)^#+ \d+\.", "", text)))


def test_every_chinese_page_is_compared() -> None:
    assert {chinese for _, chinese in PAIRS} == {*ROOT.glob("*.zh.md"), *(ROOT / "docs").glob("*.zh.md")}


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=IDS)
def test_commands_and_recipes_are_the_same(english: object, chinese: object) -> None:
    assert isinstance(english, type(ROOT))
    assert isinstance(chinese, type(ROOT))
    assert [c.text for c in commands(chinese)] == [c.text for c in commands(english)]
    for language in ("yaml", "text"):
        read = yaml.safe_load if language == "yaml" else str
        mine, theirs = blocks(text_of(chinese), language), blocks(text_of(english), language)
        assert list(map(read, mine)) == list(map(read, theirs))


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=IDS)
def test_numbers_are_the_same(english: object, chinese: object) -> None:
    assert isinstance(english, type(ROOT))
    assert isinstance(chinese, type(ROOT))
    said, told = numbers(text_of(english)), numbers(text_of(chinese))
    words = set(re.findall(r"[a-z-]+", text_of(english).lower()))
    in_words = {str(number) for word, number in WORDS.items() if word in words}
    assert said <= told, f"not in Chinese: {said - told}"
    assert told <= said | in_words, f"not in English: {told - said - in_words}"


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=IDS)
def test_pages_link_to_each_other(english: object, chinese: object) -> None:
    assert isinstance(english, type(ROOT))
    assert isinstance(chinese, type(ROOT))
    assert f"({chinese.name})" in text_of(english)
    assert f"({english.name})" in text_of(chinese)
