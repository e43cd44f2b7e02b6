"""The tables of docs/ that are made from the code: keys, verl's spellings, methods, columns.

`python tests/docs/pages_made.py` writes them between a page's `<!-- name -->` marks; test_pages_made.py holds
the pages against them. verl's own defaults are those of 0.9.1 (verl_0_9_1.json: keys that Rein reads, from
its _generated_ppo_trainer.yaml, without those that follow another key).
"""

import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rein.config import recipe as recipe_module
from rein.config.keys import LEAVES, default_of
from rein.config.methods import AUTO, DATA_NEEDS, METHODS, method_needs
from rein.config.recipe import Section
from rein.config.verl_keys import (
    ALWAYS,
    COUNTS_PROMPTS,
    FOLLOWS,
    INSTEAD,
    INSTEAD_SECTIONS,
    NOT_YET,
    NOT_YET_SECTIONS,
    PREFIX,
    PREFIXES,
    RENAMED,
    UNUSED,
)
from rein.data import schemas

ROOT = Path(__file__).parent.parent.parent
VERL: dict[str, Any] = json.loads((Path(__file__).parent / "verl_0_9_1.json").read_text(encoding="utf-8"))
IN_A_WORD = {
    "auto": "what the audit of the rows says",
    "ppo": "critic, GAE, clipped ratio; weighed by old / behavior where log-probs are stored",
    "grpo": "the prompt's other responses in the critic's place",
    "topr": "good responses imitated, bad ones pushed away while they are still likely",
    "awr": "imitation, weighed by how much better than the critic expects",
    "m2po": "the tokens that moved furthest left out, for very stale data",
    "sppo": "log-ratio to the start policy pulled towards the win probability",
    "dpo": "no critic; `actor.policy_loss.dpo_nll_coef` adds the chosen response's likelihood",
    "bc": "imitation of all rows: a control to print",
    "filtered_bc": "imitation of the rows that score 1 or more: a control to print",
}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def code(value: Any) -> str:
    """A value as YAML would have it, in backticks."""
    text = value if isinstance(value, str) else json.dumps(value, default=_plain, ensure_ascii=False)
    return f"`{text}`".replace("|", "\\|")


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, Section) else str(value)


def keys() -> str:
    """Every key of a recipe: default, and what its comment says."""
    said = dict(comments())
    found, section = [], None
    for key in sorted(LEAVES, key=lambda key: "." in key):  # the recipe's own first
        head = key.rpartition(".")[0] or "the recipe itself"
        if head != section:
            section = head
            found.append(f"\n## {head}\n\n| key | default | |\n|---|---|---|")
        found.append(f"| `{key}` | {code(default_of(key))} | {said.get(key, '')} |")
    return "\n".join(found).strip()


def comments() -> Iterator[tuple[str, str]]:
    """(dotted key, comment) of the models in rein/config/recipe.py."""
    text = Path(recipe_module.__file__).read_text(encoding="utf-8")
    told = {
        token.start[0]: (token.string.lstrip("# "), not token.line[: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    by_class: dict[str, dict[str, str]] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        end = node.lineno
        for statement in node.body:
            last = statement.end_lineno or statement.lineno
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                lines = [line for line in range(end + 1, last + 1) if line in told]
                before = [told[line][0] for line in lines if line < statement.lineno and told[line][1]]
                beside = [told[line][0] for line in lines if line >= statement.lineno]
                by_class.setdefault(node.name, {})[statement.target.id] = " ".join([*before, *beside])
            end = last
    yield from _said(recipe_module.Recipe, "", by_class)


def _said(
    model: type[Section], prefix: str, by_class: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _said(kind, f"{prefix}{name}.", by_class)
        else:
            comment = by_class.get(model.__name__, {}).get(name, "")
            yield prefix + name, re.sub(r"\s+", " ", comment).replace("|", "\\|")


def verl_name(key: str) -> str:
    """A bare key as verl spells it."""
    return f"{PREFIX}{key}" if key.partition(".")[0] in PREFIXES else key


def same() -> str:
    """Keys that verl and Rein call the same, and what each has where nobody gives one."""
    rows = []
    for spelled, default in VERL.items():
        key = bare(spelled)
        if key in LEAVES:
            own = default_of(key)
            differs = "" if equal(key, default, own) else "**differs**"
            unit = "prompts / rows" if key in COUNTS_PROMPTS else ""
            rows.append([f"`{key}`", code(default), code(own), " ".join(filter(None, (differs, unit)))])
    return table(["key, without `actor_rollout_ref.`", "verl 0.9.1", "Rein", ""], rows)


def bare(spelled: str) -> str:
    return spelled.removeprefix(PREFIX)


def equal(key: str, one: Any, other: Any) -> bool:
    names = {"kl": "k1", "vanilla": "ppo_clip"}
    if key in ("actor.clip_ratio_low", "actor.clip_ratio_high") and other is None:
        other = default_of("actor.clip_ratio")
    one, other = (list(x) if isinstance(x, tuple) else x for x in (one, other))
    return bool(names.get(str(one), one) == other)


def renamed() -> str:
    rows = [[f"`{verl_name(key)}`", f"`{own}`"] for key, own in RENAMED.items()]
    return table(["verl", "Rein"], rows)


def follows() -> str:
    rows = [[f"`{verl_name(key)}`", f"`{own}`"] for key, own in FOLLOWS.items()]
    return table(["verl", "must equal"], rows)


def unused() -> str:
    rows = [[f"`{verl_name(key)}`", reason] for key, reason in UNUSED.items()]
    return table(["verl", "is read and not used, because"], rows)


def always() -> str:
    return table(["verl", "always true here"], [[f"`{verl_name(key)}`", why] for key, why in ALWAYS.items()])


def instead() -> str:
    rows = [[f"`{verl_name(key)}`", do] for key, do in INSTEAD.items()]
    rows += [[f"`{verl_name(key)}*`", f"write {do}"] for key, do in INSTEAD_SECTIONS.items()]
    return table(["verl", "here"], rows)


def not_yet() -> str:
    rows = [
        [
            f"`{verl_name(key)}`",
            ", ".join(code(v) for v in off.values if v is not None) or "`null`",
            off.feature,
        ]
        for key, off in NOT_YET.items()
    ]
    rows += [[f"`{verl_name(key)}*`", "off", feature] for key, feature in NOT_YET_SECTIONS.items()]
    return table(["verl", "accepted values", "any other asks for"], rows)


def methods() -> str:
    rows = []
    for name in METHODS:
        needs = [DATA_NEEDS[need].replace(" in every row", "") for need in sorted(method_needs(name))]
        scores = [] if name in ("bc", "dpo") else ["scores"]
        needed = "what the found method needs" if name == AUTO else ", ".join(scores + needs) or "nothing"
        sets = " ".join(
            f"`{key}={'null' if v is None else json.dumps(v).strip(chr(34))}`"
            for key, v in METHODS[name].items()
        )
        default = " (default)" if name == default_of("algorithm.method") else ""
        rows.append([f"`{name}`{default}", needed, IN_A_WORD[name], sets])
    return table(["method", "needs of the rows", "in a word", "sets"], rows)


def columns() -> str:
    needed = {
        "prompts": ["prompt"],
        "trajectories": ["prompt or prompt_ids", "response or response_ids"],
        "preferences": ["prompt", "chosen", "rejected"],
        "sft": ["messages, or prompt and response"],
    }
    made = {
        "prompts": schemas.PROMPTS,
        "trajectories": schemas.TRAJECTORIES,
        "preferences": schemas.PREFERENCES,
        "sft": schemas.SFT,
    }
    rows = []
    for kind, schema in made.items():
        said = re.findall(r"\w+", " ".join(needed[kind]))
        others = ", ".join(f"`{name}`" for name in schema.names if name not in said)
        rows.append([kind, re.sub(r"\b(?!or\b|and\b)\w+", r"`\g<0>`", ", ".join(needed[kind])), others])
    return table(["kind", "must have", "may have"], rows)


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "keys": ("keys.md", keys),
    "same": ("from-verl.md", same),
    "renamed": ("from-verl.md", renamed),
    "follows": ("from-verl.md", follows),
    "unused": ("from-verl.md", unused),
    "always": ("from-verl.md", always),
    "instead": ("from-verl.md", instead),
    "not_yet": ("from-verl.md", not_yet),
    "methods": ("which-method.md", methods),
    "schemas": ("your-own-data.md", columns),
}


def block(text: str, name: str) -> str:
    """What stands between a page's marks."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    assert found is not None, f"the page has no marks of {name}"
    return found[1].strip()


def main() -> None:
    for name, (page, make) in BLOCKS.items():
        path = ROOT / "docs" / page
        text = path.read_text(encoding="utf-8")
        block(text, name)
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- /{name} -->")
        path.write_text(f"{before}{start}{make()}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
