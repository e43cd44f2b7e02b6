"""docs/guards.md against the code: keys, actions, remedies, bounds, defaults, the presets; examples work."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rein.config.guards import ACTIONS, REMEDIES, Condition, Rule
from rein.config.load import load
from rein.config.recipe import Guards
from rein.guards.decide import GRAVITY
from rein.guards.presets import guards_of, preset
from rein.guards.rules import REST, WINDOW, action_of
from rein.probe import PROBE_ROWS
from rein.remedies import BOUNDS, HIGH, LOW, MOST_EXTRA_EPOCHS, soften
from rein.tracking.webhook import TIMEOUT_S
from rein.types import Action, Softening

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "guards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
PRESETS = ("cautious", "standard")
RULES = {name: {rule["name"]: rule for rule in preset(name)} for name in PRESETS}


def table(head: str) -> list[list[str]]:
    """The cells of the table that starts with this head."""
    lines = PAGE[PAGE.index(head) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def code(cell: str) -> str:
    return cell.strip("`")


KEYS = table("| key | default | means | example |")
REMEDY_ROWS = table("| remedy | amount | in all | does |")


def test_the_sections_keys_and_their_defaults_are_the_recipes() -> None:
    defaults = {name: field.get_default() for name, field in Guards.model_fields.items()}
    told = {code(row[0]).removeprefix("guards."): code(row[1]) for row in table("| key | default | |")}
    assert told == {name: "none" if value is None else str(value) for name, value in defaults.items()}
    assert f"is read after every {defaults['probe_every']} updates" in PAGE
    assert f"at the start, every {defaults['snapshot_every']} updates" in PAGE
    assert f"once probes at least {defaults['confirm_steps']} updates later" in PAGE
    assert f"`guards.preset={defaults['preset']}` is on by default" in PAGE
    assert defaults["max_skips"] == 10
    assert "ten in a row of one role stop the run" in PAGE
    assert f"*The probe*, {PROBE_ROWS} held-out rows" in PAGE
    assert TIMEOUT_S == 5
    assert "within five seconds" in PAGE


def test_every_key_of_a_rule_is_told() -> None:
    fields = {field.alias or name for name, field in Rule.model_fields.items()}
    assert {code(row[0]) for row in KEYS} == fields
    told = {code(row[0]): row[1] for row in KEYS}
    assert told["window"] == str(WINDOW)
    assert told["rest"].startswith(f"{REST};")
    inner = re.search(r"The keys of a test in `when` are (.*?)\.", PAGE, re.DOTALL)
    assert inner is not None
    tests = {"above", "below", "rises", "falls", "flat", "not_finite"}
    assert set(re.findall(r"`(\w+)`", inner[1])) == set(Condition.model_fields) - tests


@pytest.mark.parametrize(("key", "example"), [(code(row[0]), code(row[3])) for row in KEYS])
def test_the_example_of_a_key_uses_it_and_is_a_rule(key: str, example: str) -> None:
    written: dict[str, Any] = yaml.safe_load(example)
    assert key in written
    accepted(Guards.model_validate({"preset": "off", "rules": [written]}))


def accepted(guards: Guards) -> None:
    for guard in guards_of(guards):
        soften(Softening(), getattr(guard, "remedies", ()))


def test_the_actions_are_those_there_are_from_light_to_grave() -> None:
    told = [code(row[0]) for row in table("| action | does |")]
    assert told == list(ACTIONS)
    gravities = [GRAVITY.index(action_of(word)[0]) for word in told]
    assert gravities == sorted(gravities)


def test_the_remedies_and_their_bounds_are_those_there_are() -> None:
    told = {code(row[0]): row[2] for row in REMEDY_ROWS}
    assert tuple(told) == REMEDIES
    for name, bounds in told.items():
        if name in LOW:
            assert bounds == f"x{LOW[name]:.3g} to x{HIGH[name]:.3g}"
        elif name in BOUNDS:
            assert bounds == "{:g} to {:g}".format(*BOUNDS[name])
        elif name == "ppo_epochs":
            assert bounds == f"-{MOST_EXTRA_EPOCHS} to +{MOST_EXTRA_EPOCHS}"
        else:
            assert bounds == ""


def test_every_rule_of_the_presets_is_explained_with_what_it_reads() -> None:
    told = {code(row[0]): (row[1], row[2]) for row in table("| rule | reads | in | why |")}
    known: dict[str, tuple[str, str]] = {}
    for name in [*RULES["standard"], *RULES["cautious"]]:
        where = [one for one in PRESETS if name in RULES[one]]
        metric = RULES[where[0]][name]["metric"]
        reads = "any loss or gradient" if metric == "*" else f"`{metric}`"
        known[name] = (reads, "both" if len(where) == len(PRESETS) else where[0])
    assert told == known
    assert all(row[3] for row in table("| rule | reads | in | why |"))


def test_the_articles_ladder_is_what_cautious_does() -> None:
    ladder = [RULES["cautious"][name] for name in ("kl_soft", "kl_firm", "kl_high", "drift")]
    assert [rule["above"] for rule in ladder] == [0.02, 0.03, 0.05, 0.02]
    assert [rule["then"] for rule in ladder[:2]] == [[{"kl_coef": 1.5}], [{"lr": 0.5}]]
    assert ladder[2]["then"][0] == "rollback"
    assert ladder[3]["then"] == "refresh"
    assert "KL 0.02: `kl_coef` x1.5; 0.03: also `lr` x0.5; 0.05: back;" in PAGE


@pytest.mark.parametrize("block", BLOCKS)
def test_a_recipe_on_the_page_is_one(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (function,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_rules.py").write_text(function)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "recipe.yaml").write_text(block)
    recipe, _ = load(str(tmp_path / "recipe.yaml"), [])
    accepted(recipe.guards)


def test_rules_on_a_command_line_are_read() -> None:
    words = re.findall(r"rein train recipe\.yaml '(guards\.rules=.*?)'", PAGE)
    assert words
    for word in words:
        rules = load(None, [word])[0].guards.rules
        accepted(Guards.model_validate({"rules": [rule for rule in rules if not isinstance(rule, str)]}))


def test_the_functions_on_the_page_do_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (function,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_rules.py").write_text(function)
    monkeypatch.syspath_prepend(str(tmp_path))
    rules = ["my_rules:too_short", "my_rules:Streak"]
    _, short, streak = guards_of(Guards.model_validate({"preset": "off", "rules": rules}))
    found = short({"val/response_length": 3.0})
    assert found is not None
    assert found.action is Action.PAUSE
    assert short({"probe/entropy": 1.0}) is None
    said = [streak({"val/score": score}) for score in (0.5, 0.6, 0.5, 0.5)]
    kept = streak.state()
    streak({"val/score": 0.9})
    streak.restore(kept)
    found = streak({"val/score": 0.4})
    assert said == [None] * 4
    assert found is not None
    assert (found.action, found.to_best, found.remedies) == (Action.ROLLBACK, True, (("lr", 0.5),))
    assert (found.value, found.limit) == (0.4, 0.6)
