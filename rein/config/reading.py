"""Text in, entries out: one per key that a YAML file or the command line gives, with where it stands.

Scalars are read by YAML 1.2's rules: 1e-6 is a number, yes and no are words, 010 is ten. Does not know which
keys exist; it is told which dotted key is a leaf, so that a leaf's own mapping or list stays whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rein.errors import ConfigError

COMMAND_LINE = "command line"
MAX_DEPTH = 16  # of sections
DEEPEST_VALUE = 64
# What PyYAML's constructors raise beside their own error: `!!bool maybe` a KeyError, `!!timestamp x` another.
_NOT_PLAIN = (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
IsLeaf = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Entry:
    """One key and its value. Entry("actor.lr", 1e-6, "1e-6", "demo.yaml line 7", "actor.lr")"""

    key: str  # dotted; a translation may change it
    value: Any
    text: str | None  # the scalar as it was written; None for lists and mappings
    where: str
    spelled: str  # the key as it was written


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2's scalars: no sexagesimal or octal numbers, no dates, no yes/no booleans."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = node.value.lower().replace("_", "")
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_DIGITS = "0123456789"
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*", "-+" + _DIGITS),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+." + _DIGITS,
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor(
    "tag:yaml.org,2002:int",
    lambda loader, node: int(node.value.replace("_", "")),  # decimal, as in YAML 1.2
)
_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def read_file(path: Path, is_leaf: IsLeaf) -> list[Entry]:
    """The entries of a YAML (or JSON) file.

    Raises ConfigError: unreadable, not YAML, not a mapping, a key twice.
    """
    name = str(path)
    try:
        text = path.read_text(encoding="utf-8")
    except IsADirectoryError as error:
        raise ConfigError(f"{name}: is a folder; give the recipe's YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: is not UTF-8 text; give the recipe's YAML file") from error
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read ({error.strerror}); check the path") from error
    node, loader = _compose(text, name)
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{name}: holds no `key: value` lines; give the recipe's YAML file")
    entries = list(_flatten(node, "", name, loader, is_leaf))
    loader.dispose()
    refuse_twice(entries)
    return entries


def read_words(words: Sequence[str], is_leaf: IsLeaf) -> list[Entry]:
    """The entries of `key=value` words; the value is read by YAML's rules; Hydra's leading + is dropped.

    Raises ConfigError: no `=`, a value that is not YAML, a key twice.
    """
    entries: list[Entry] = []
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("+").strip()
        if not equals or not key:
            raise ConfigError(f"{COMMAND_LINE}: {word!r} is not key=value; write for example seed=3")
        node, loader = _compose(text, f"{COMMAND_LINE}: {word}")
        if isinstance(node, yaml.MappingNode) and node.value and not is_leaf(key):
            entries.extend(_flatten(node, key, COMMAND_LINE, loader, is_leaf))
        else:
            value = None if node is None else _construct(loader, node, f"{COMMAND_LINE}: {word}")
            scalar = text.strip() if node is None or isinstance(node, yaml.ScalarNode) else None
            entries.append(Entry(key, value, scalar, COMMAND_LINE, key))
        loader.dispose()
    refuse_twice(entries)
    return entries


def refuse_twice(entries: Sequence[Entry]) -> None:
    """Raise ConfigError when one source gives a key twice, in one spelling or in two."""
    seen: dict[str, Entry] = {}
    for entry in entries:
        first = seen.setdefault(entry.key, entry)
        if first is entry:
            continue
        if first.spelled == entry.spelled:
            raise ConfigError(
                f"{entry.where}: {entry.spelled} is given twice{_also(first, entry)}; keep one of them"
            )
        raise ConfigError(
            f"{entry.where}: {entry.spelled} and {first.spelled}{_also(first, entry)} are one setting "
            f"({entry.key}); keep one of them"
        )


def _also(first: Entry, second: Entry) -> str:
    return "" if first.where == second.where else f" (also {first.where})"


def _compose(text: str, where: str) -> tuple[yaml.Node | None, _Loader]:
    try:
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        unreadable = "nested too deeply" if isinstance(error, RecursionError) else "unreadable"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or unreadable
        line = f" line {mark.line + 1}" if mark is not None and not where.startswith(COMMAND_LINE) else ""
        advice = "quote the value" if where.startswith(COMMAND_LINE) else "check indentation and quotes there"
        raise ConfigError(f"{where}{line}: is not YAML ({problem}); {advice}") from error
    return node, loader


def _flatten(
    node: yaml.MappingNode, prefix: str, name: str, loader: _Loader, is_leaf: IsLeaf, depth: int = 0
) -> list[Entry]:
    entries: list[Entry] = []
    for key_node, value_node in node.value:
        where = _where(name, key_node)
        if not isinstance(key_node, yaml.ScalarNode) or depth > MAX_DEPTH:
            raise ConfigError(f"{where}: this key is not a plain word; write `section:` or `key: value`")
        key = f"{prefix}.{key_node.value}" if prefix else str(key_node.value)
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not is_leaf(key):
            entries.extend(_flatten(value_node, key, name, loader, is_leaf, depth + 1))
            continue
        text = value_node.value if isinstance(value_node, yaml.ScalarNode) else None
        entries.append(Entry(key, _construct(loader, value_node, f"{where}: {key}"), text, where, key))
    return entries


def _refuse_unreadable(node: yaml.Node, where: str, depth: int = 0) -> None:
    """A mapping inside a value must not give a key twice either: YAML would keep the last in silence.

    Nor may a value hold itself. Raises UnicodeEncodeError for half a surrogate pair, which is no text.
    """
    if depth > DEEPEST_VALUE:
        raise ConfigError(f"{where}: is nested too deeply; write a number, text, list or mapping")
    if isinstance(node, yaml.ScalarNode):
        node.value.encode()
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_unreadable(item, where, depth + 1)
    elif isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{where}: {key} is given twice; keep one of them")
        for pair in node.value:
            for part in pair:
                _refuse_unreadable(part, where, depth + 1)


def _where(name: str, node: yaml.Node) -> str:
    return name if name == COMMAND_LINE else f"{name} line {node.start_mark.line + 1}"


def _construct(loader: _Loader, node: yaml.Node, where: str) -> Any:
    try:
        _refuse_unreadable(node, where)
        return loader.construct_object(node, deep=True)
    except ConfigError:
        raise
    except _NOT_PLAIN as error:
        problem = getattr(error, "problem", None) or error
        raise ConfigError(
            f"{where}: is not a plain value ({problem}); write a number, text, list or mapping"
        ) from error
