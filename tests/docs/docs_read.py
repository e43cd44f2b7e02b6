"""README.md and docs/*.md as tests read them: fenced blocks, commands, recipes."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
SHELL = ("", "sh", "bash", "shell", "console")
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)


class Command(NamedTuple):
    """One command of a page, without its comment; `said` is the comment."""

    page: str
    text: str
    said: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, *languages: str) -> list[str]:
    """Fenced blocks in one of these languages, in order."""
    return [found[3] for found in FENCE.finditer(text) if found[2] in languages]


def without_blocks(text: str) -> str:
    return FENCE.sub("", text)


def commands(page: Path) -> list[Command]:
    """A page's commands in order; the tree of rein/ is no command, nor is what is fenced as `text`."""
    found = []
    for block in blocks(text_of(page), *SHELL):
        if not block.startswith("rein/"):
            found += [Command(name_of(page), *_split(line)) for line in _whole_lines(block)]
    return found


def _whole_lines(block: str) -> list[str]:
    """Lines, with what a backslash or an open quote continues joined to the first."""
    found, open_line = list[str](), ""
    for line in block.splitlines():
        open_line = f"{open_line}\n{line}" if open_line else line
        if open_line.endswith("\\"):
            open_line = open_line[:-1].rstrip()
            continue
        try:
            words = shlex.split(open_line, comments=True)
        except ValueError:  # a quote is open
            continue
        if words:
            found.append(open_line)
        open_line = ""
    assert not open_line, f"a command has no end: {open_line}"
    return found


def _split(line: str) -> tuple[str, str]:
    """(command, comment)"""
    for at in (found.start() for found in re.finditer(r"(?:^|\s)#\s", line)):
        try:
            shlex.split(line[:at])
        except ValueError:  # inside a quote
            continue
        return " ".join(line[:at].split()), line[at:].strip().lstrip("# ")
    return (line if "\n" in line else " ".join(line.split())), ""


def recipes(page: Path) -> dict[str, str]:
    """The page's whole recipes by file name: a YAML block whose first line is `# NAME.yaml`."""
    found = {}
    for block in blocks(text_of(page), "yaml"):
        named = re.match(r"# ([\w.-]+\.yaml)\n", block)
        if named:
            found[named[1]] = block
    return found
