"""Every command of README and docs works: parsed for real here, and run for real where a laptop can (slow).

A page's commands run in order, in one folder that holds what world_made.py makes and the page's recipes.
NOT_RUN lists what is parsed alone, each with a reason; an entry that no page has any more fails. Every YAML
block is a recipe.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import world_made
import yaml
from docs_read import PAGES, ROOT, Command, blocks, commands, name_of, recipes, text_of

from rein.cli import _parser, _with_values
from rein.commands import convert
from rein.commands.audit import _read as audited
from rein.commands.demo import recipe_of
from rein.config.load import load
from rein.config.reading import _Loader
from rein.data.formats import FORMATS
from rein.errors import ConfigError

ALL = [command for page in PAGES for command in commands(page)]
SOURCE = ROOT / "docs" / "your-own-data.md"  # its recipe.yaml is that of pages that have none
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
PLAIN = ("cat", "ls", "tail", "source", "python", "git", "cd")  # what a shell and Python have

NOT_RUN = {  # what begins so -> why it is parsed alone
    "pip install ": "changes the environment; the extra is looked up",
    "make ": "installs, and takes minutes; `make demo` has a stand-in below",
    "source .venv/bin/activate": "changes the reader's shell; the tests run in an environment already",
    "rein demo reward=": "minutes each; tests/e2e/test_pipeline_whole.py runs all stages",
    "torchrun ": "two machines",
    "rein train recipe.yaml runtime=ray": "a cluster; tests/e2e/test_ray.py starts one",
    "rein train recipe.yaml runtime=fsdp": "several processes; tests/e2e/test_ranks.py starts them",
    "benchmarks/gpu_check.sh": "a GPU",
    "rein rollout recipe.yaml rollout.engine=vllm": "vLLM in an environment of its own; make vllm",
    "rein rollout recipe.yaml rollout.engine=server": "a server; tests/stages/test_rollout_server.py",
    "rein train recipe.yaml model.use_torch_compile=true": "a C++ compiler",
    "rein train recipe.yaml trainer.logger=[console,wandb": "an account and packages; make trackers",
}
SERVES = ("ui",)  # verbs that serve until they are stopped: parsed alone
STAND_INS = {  # the same work, less of it
    "make demo": "rein demo sft.total_steps=40 rollout.max_prompts=200 rollout.n=4 trainer.total_epochs=1 "
    "data.train_batch_size=512 trainer.critic_warmup=2 evaluate.max_prompts=60 evaluate.pass_k=0 "
    "export.force=true",
}
LESS = {  # of a page's recipe: the same keys otherwise
    "trainer": {"critic_warmup": 2, "val_prompts": 16},
    "evaluate": {"pass_k": 2, "max_prompts": 60},
    "actor": {"ppo_epochs": 1},
    "data": {"train_batch_size": 512, "max_response_length": 48},
}
FIRST = {  # what a page takes to be there
    "docs/speed.md": ("rein score recipe.yaml",),
    "docs/guards.md": ("rein score recipe.yaml",),
    "docs/evaluate-and-ship.md": (
        "rein run recipe.yaml --force",
        "rein deploy runs/first/export/model --to models/served",
    ),
}
# Their commands are alternatives, each a run of its own.
OUT_OF_ITS_OWN = ("docs/speed.md", "docs/guards.md", "docs/refresh.md", "docs/which-method.md")
LESS_WORDS = (
    "trainer.critic_warmup=2 actor.ppo_epochs=1 trainer.val_prompts=16 evaluate.pass_k=0 "
    "data.train_batch_size=512 actor.ppo_mini_batch_size=128"
)
EXITS = {  # besides 0, or instead: the small model need not be better than its start
    "rein run recipe.yaml": {0, 5},
    "rein run first.yaml": {0, 5},
    "rein run recipe.yaml trainer.refresh_every=8": {0, 5},
    "rein run recipe.yaml trainer.refresh_every=1": {0, 5},
    "rein export recipe.yaml gate.min_score=0.5": {5},
    # Most of the small model's answers are wrong, and then a guard may leave all updates out.
    "rein run topr model.path=models/my-sft-model data.train_files=trajectories.parquet out=runs/topr": {
        0,
        4,
    },
    "rein run first.yaml actor.optim.learning_rate=1e-4": {2},
}


def reason(command: Command) -> str | None:
    """Why a command is not run."""
    found = [why for begins, why in NOT_RUN.items() if command.text.startswith(begins)]
    if command.text.split()[:1] == ["rein"] and command.words[1] in SERVES:
        found.append("serves until it is stopped")
    return found[0] if found else None


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recipes_of(page: Path) -> dict[str, str]:
    return recipes(SOURCE) | recipes(page)


@pytest.mark.parametrize("command", ALL, ids=[f"{c.page}: {c.text[:70]}" for c in ALL])
def test_a_command_is_one(command: Command, here: Path) -> None:
    for name, text in recipes_of(ROOT / command.page).items():
        (here / name).write_text(text)
    words = command.words
    if words[0] == "rein":
        if 2 in EXITS.get(command.text, {0}):
            with pytest.raises(ConfigError) as refused:
                parse(words[1:])
            meant = re.search(r"did you mean ([\w.]+)\?", str(refused.value))
            assert meant is not None
            assert meant[1] in command.said
        else:
            parse(words[1:])
    elif words[0] == "make":
        assert words[1] in TARGETS, f"make has no target {words[1]}"
    elif words[0] == "torchrun":
        parse(words[words.index("rein") + 1 :])
    elif words[0] == "pip":
        extras = re.findall(r"rein\[(\w+)\]", command.text)
        assert set(extras) <= set(
            tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        )
    elif "/" in words[0]:
        assert (ROOT / words[0]).is_file(), f"{words[0]} is not there"
    else:
        assert words[0] in PLAIN, f"{words[0]} is no command that the pages may use"


def parse(words: list[str]) -> None:
    """As rein itself would, up to opening data and models. Raises ConfigError."""
    rest = sorted(_with_values(words[1:]), key=lambda w: not w.startswith("-"))
    found = _parser().parse_args([*words[:1], *rest])
    if found.verb == "demo":
        recipe_of(found.words)
    elif found.verb == "audit":
        audited(found.words, found.model, found.against)
    elif found.verb == "convert":
        assert getattr(found, "from") in (None, convert.AUTO, *FORMATS)
        assert found.to in (None, *convert.KINDS)
    elif hasattr(found, "recipe") and found.verb not in SERVES:
        source, given = found.recipe, list(found.words)
        if source is not None and "=" in source:
            source, given = None, [source, *given]
        load(source, given)


def test_what_is_not_run_is_there() -> None:
    idle = [begins for begins in NOT_RUN if not any(command.text.startswith(begins) for command in ALL)]
    assert not idle, f"no page has these any more: {idle}"
    texts = {command.text for command in ALL}
    assert set(STAND_INS) | set(EXITS) <= texts
    assert {*FIRST, *OUT_OF_ITS_OWN} <= {command.page for command in ALL}


RECIPES = [
    (name_of(page), i, text) for page in PAGES for i, text in enumerate(blocks(text_of(page), "yaml", "json"))
]


@pytest.mark.parametrize(("page", "i", "text"), RECIPES, ids=[f"{page}-{i}" for page, i, _ in RECIPES])
def test_a_recipe_on_a_page_is_one(page: str, i: int, text: str, here: Path) -> None:
    (here / "recipe.yaml").write_text(text)
    load("recipe.yaml", [])


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return world_made.make(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="session")
def shell(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a shell that has `rein` and `python`."""
    folder = tmp_path_factory.mktemp("bin")
    for name, call in (("rein", "-m rein"), ("python", "")):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:.",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


RUN = {  # the Chinese pages' commands are the English ones' (test_chinese.py)
    name_of(page): [c for c in commands(page) if c.text in STAND_INS or reason(c) is None]
    for page in PAGES
    if not page.name.endswith(".zh.md")
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, found in RUN.items() if found])
def test_a_pages_commands_run(page: str, world: Path, shell: dict[str, str], tmp_path: Path) -> None:
    folder = tmp_path / "clone"
    shutil.copytree(world, folder, ignore=shutil.ignore_patterns("made", "base"))
    shutil.copy(world / "scored.parquet", folder / "trajectories.parquet")
    for command in RUN[page]:
        if command.text.startswith("rein convert "):  # it makes what it names last
            made = [word for word in command.words if word.endswith(".parquet")][-1]
            (folder / made).unlink(missing_ok=True)
    for name, text in recipes_of(ROOT / page).items():
        recipe = yaml.load(text, _Loader)  # 1e-6 is a number
        for section, keys in LESS.items():
            recipe[section] = recipe.get(section, {}) | keys
        (folder / name).write_text(json.dumps(recipe))
    for text in blocks(text_of(ROOT / page), "python"):
        if text.startswith("# my_rules.py"):
            (folder / "my_rules.py").write_text(text)
    with (folder / "my_rules.py").open("a") as file:
        file.write("\n\ndef mine(metrics):\n    return None\n")
    for text in FIRST.get(page, ()):
        run(text, {0}, folder, shell)
    for i, command in enumerate(RUN[page]):
        text = STAND_INS.get(command.text, command.text)
        if page in OUT_OF_ITS_OWN:
            anew = "resume=never" if text.startswith("rein train") else f"out=runs/alone{i}"
            text += f" {LESS_WORDS}" + ("" if " out=" in text else f" {anew}")
        run(text, EXITS.get(command.text, {0}), folder, shell)


def run(text: str, codes: set[int], folder: Path, shell: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=shell, capture_output=True, text=True, check=False
    )
    assert done.returncode in codes, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
