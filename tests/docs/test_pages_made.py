"""The tables of docs/ that are made from the code are those that the code makes today."""

import pytest
from pages_made import BLOCKS, IN_A_WORD, ROOT, VERL, bare, block

from rein.config.keys import LEAVES
from rein.config.methods import METHODS
from rein.config.verl_keys import FOLLOWS, RENAMED


@pytest.mark.parametrize("name", BLOCKS)
def test_a_table_is_what_the_code_makes(name: str) -> None:
    page, make = BLOCKS[name]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert block(text, name) == make(), f"docs/{page}: run python tests/docs/pages_made.py"


def test_every_key_is_on_the_page_of_keys() -> None:
    text = (ROOT / "docs" / "keys.md").read_text(encoding="utf-8")
    assert not [key for key in LEAVES if f"| `{key}` |" not in text]


def test_every_method_is_explained() -> None:
    assert set(IN_A_WORD) == set(METHODS)


def test_verls_defaults_are_of_keys_that_rein_reads() -> None:
    assert not [
        key for key in VERL if RENAMED.get(bare(key), bare(key)) not in LEAVES and bare(key) not in FOLLOWS
    ]
