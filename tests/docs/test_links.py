"""Every relative link and anchor of README and docs resolves; every key in backticks exists."""

import re

import pytest
from docs_read import PAGES, ROOT, name_of, text_of, without_blocks
from pages_made import VERL, bare

from rein.config.keys import LEAVES, SECTIONS
from rein.config.verl_keys import ALWAYS, FOLLOWS, INSTEAD, NOT_YET, RENAMED, SETTLED, UNUSED

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_0-9]+)+)(?:=[^`]*)?`")
TOP = {key.partition(".")[0] for key in LEAVES}
VERLS = {*RENAMED, *FOLLOWS, *NOT_YET, *ALWAYS, *UNUSED, *INSTEAD, *SETTLED, *map(bare, VERL)}
FILES = (".py", ".md", ".yaml", ".json", ".jsonl", ".html", ".parquet", ".sh", ".svg")
OF_VERL = {"trainer.rollout_data_dir", "trainer.validation_data_dir", "critic.enable", "trainer.resume_mode"}


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    heads = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_links_resolve(page: object) -> None:
    assert isinstance(page, type(ROOT))
    for target in LINK.findall(without_blocks(text_of(page))):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target} is not there"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(text_of(file)), f"{name_of(page)}: {target} has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_keys_in_backticks_exist(page: object) -> None:
    assert isinstance(page, type(ROOT))
    for key in KEY.findall(without_blocks(text_of(page))):
        if key.partition(".")[0] not in TOP or key.endswith(FILES):
            continue
        known = key in LEAVES or key in SECTIONS or key in OF_VERL
        assert known or (key in VERLS and "verl" in text_of(page)), f"{name_of(page)}: {key} is no key"


def test_every_page_is_in_the_index() -> None:
    index = text_of(ROOT / "docs" / "README.md")
    pages = [page.name for page in PAGES if page.parent.name == "docs" and page.name != "README.md"]
    assert not [name for name in pages if f"({name})" not in index and not name.endswith(".zh.md")]


METRIC = re.compile(r"`((?:actor|critic|kl|probe|val|ope|rollout_corr|perf|timing_s|training)/[a-z_0-9/]+)`")
SOURCE = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "rein").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_metrics_in_backticks_are_logged(page: object) -> None:
    assert isinstance(page, type(ROOT))
    for metric in METRIC.findall(without_blocks(text_of(page))):
        group, *names = metric.split("/")
        tail = names[-1].removeprefix("rollout_is_")
        written = [f'"{metric}"', f'"{group}/{names[0]}', *(f'"{name}"' for name in (*names, tail))]
        assert any(text in SOURCE for text in written), f"{name_of(page)}: {metric} is logged nowhere"
