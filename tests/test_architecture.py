"""The layers of the package as tests: imports point down, files stay short, the README shows the folders."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rein"

# A file may import lower layers and its own folder. Parts of one layer do not know each other.
LAYERS: dict[str, int] = {
    "functional": 0,
    "types": 1,
    "errors": 1,
    "verbs": 1,
    "protocols": 2,
    "config": 2,
    "tables": 2,
    "drafts": 2,
    "model_files": 2,
    "sharing": 2,
    "sharded": 2,
    "jail": 2,
    "matmul": 2,
    "hashing": 1,
    **dict.fromkeys(("data", "models", "engines", "rewards", "guards", "tracking", "report", "runtime"), 3),
    **dict.fromkeys(
        ("experience", "learner", "validator", "remedies", "snapshots", "journal", "manifest"), 4
    ),
    **dict.fromkeys(("probe", "scorer", "audit", "gate", "ui"), 4),
    "stages": 5,
    "commands": 5,
    "cli": 6,
    "__main__": 7,
}
FILE_LINES, FUNCTION_LINES = 300, 60
LONGER: dict[str, str] = {
    "config/recipe.py": "every key on one page"
}  # file or file:function -> why it may be longer
IMPORTS_TORCH_ONLY = {"torch", "rein"} | set(sys.stdlib_module_names)

FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(file.relative_to(PACKAGE)) for file in FILES]


def imports(file: Path) -> Iterator[tuple[str, int]]:
    """Absolute names of what a file imports, wherever in it, with the line."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: imports are absolute"
            module = node.module or ""
            if module in ("rein", "rein.stages", "rein.commands"):
                yield from ((f"{module}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def part(module: str) -> str:
    """The part of the package a module belongs to: its first name below rein."""
    return module.split(".")[1]


def own_part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_every_part_has_a_layer() -> None:
    found = {own_part(file) for file in FILES} - {"__init__"}
    assert found <= set(LAYERS), f"no layer for {sorted(found - set(LAYERS))}"


@pytest.mark.parametrize("name", NAMES)
def test_imports_point_down(name: str) -> None:
    file = PACKAGE / name
    mine = own_part(file)
    for module, line in imports(file):
        if not module.startswith("rein.") or module == "rein.__version__":
            continue
        theirs = part(module)
        down = LAYERS[theirs] < LAYERS.get(mine, 0)
        command_of_stage = mine == "commands" and theirs == "stages"
        assert theirs == mine or down or command_of_stage, (
            f"rein/{name}:{line}: {mine} must not know {theirs}"
        )


def stage_modules() -> set[str]:
    """The modules that are verbs: those that pipeline.py lists."""
    text = (PACKAGE / "stages" / "pipeline.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(rein\.stages\.\w+)"', text))


def test_stages_never_import_stages() -> None:
    verbs = stage_modules()
    assert verbs
    for file in (PACKAGE / "stages").glob("*.py"):
        for module, line in imports(file):
            assert module not in verbs or file.name == "pipeline.py", (
                f"{file.name}:{line}: imports the verb {module}"
            )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("functional/")])
def test_the_maths_knows_torch_and_itself(name: str) -> None:
    for module, line in imports(PACKAGE / name):
        root = module.partition(".")[0]
        assert root in IMPORTS_TORCH_ONLY, f"rein/{name}:{line}: {module}"
        assert root != "rein" or module.startswith("rein.functional"), f"rein/{name}:{line}: {module}"


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("data/", "config/"))])
def test_data_and_config_import_no_torch(name: str) -> None:
    roots = {module.partition(".")[0] for module, _ in imports(PACKAGE / name)}
    assert not roots & {"torch", "transformers", "peft"}, f"rein/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_files_and_functions_stay_short(name: str) -> None:
    text = (PACKAGE / name).read_text(encoding="utf-8")
    if name not in LONGER:
        assert len(text.splitlines()) <= FILE_LINES, f"rein/{name} has {len(text.splitlines())} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and f"{name}:{node.name}" not in LONGER:
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"rein/{name}:{node.name} has {lines} lines"


def test_the_list_of_longer_ones_is_needed() -> None:
    for name in LONGER:
        file, _, function = name.partition(":")
        assert (PACKAGE / file).exists(), name
        if not function:
            assert len((PACKAGE / file).read_text(encoding="utf-8").splitlines()) > FILE_LINES, name


@pytest.mark.parametrize("name", NAMES)
def test_modules_say_what_they_are(name: str) -> None:
    text = (PACKAGE / name).read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text)), f"rein/{name} has no docstring"


def test_no_file_is_called_after_nothing() -> None:
    vague = {"utils.py", "common.py", "helpers.py", "misc.py", "base.py"}
    assert not {file.name for file in FILES} & vague


def readme_tree() -> list[tuple[int, str]]:
    """(indent, name) of each line of the README's tree of rein/."""
    blocks = re.findall(r"```\w*\n(rein/.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1, "README.md has one tree, a code block that starts with rein/"
    lines = [line for line in blocks[0].splitlines()[1:] if line.strip()]
    return [
        (len(line) - len(line.lstrip()), line.split()[0]) for line in lines if re.match(r" +[\w.]+", line)
    ]


def test_the_readme_tree_is_the_folders() -> None:
    tree = readme_tree()
    shallowest = min(indent for indent, _ in tree)
    listed = {name.rstrip("/") for indent, name in tree if indent == shallowest}
    found = {
        p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.*")) and p.name != "__pycache__"
    }
    found |= {p.name for p in PACKAGE.glob("*.py") if not p.name.startswith("__")}
    assert listed == found
