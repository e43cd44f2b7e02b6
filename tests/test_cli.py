"""The command line: instant help, one-line errors with their exit codes, options in any order."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rein import cli
from rein import errors as e
from rein.config.load import load

ROOT = Path(__file__).parent.parent
VERBS = (
    *("sft", "reward", "rollout", "score", "train", "evaluate", "export", "report"),
    *("run", "demo", "check", "convert", "cache", "deploy"),
)


def rein(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rein", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and the one line on stderr."""
    code = cli.main(words)
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    return code, err


def test_help_is_instant_and_names_every_verb() -> None:
    spent = []
    for _ in range(3):
        started = time.monotonic()
        done = rein("--help")
        spent.append(time.monotonic() - started)
    assert done.returncode == 0
    for verb in VERBS:
        assert re.search(rf"^    {verb} +\w", done.stdout, re.MULTILINE), verb
    assert min(spent) < 0.5, spent


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, rein.cli; rein.cli._parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"torch", "transformers", "pydantic", "yaml", "rich", "numpy"} & set(done.stdout.split())


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([verb, "--help"])
    assert caught.value.code == 0
    assert f"example: rein {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_words_are_valid(verb: str, tmp_path: Path) -> None:
    words = [
        w
        for w in cli.EXAMPLES[verb].split()[2:]
        if "=" in w and not (verb == "demo" and w.startswith("reward="))
    ]
    load(None, words)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"rein \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_no_words_at_all_is_a_usage_error_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "verbs:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "r.yaml"], "did you mean train?"),
        (["train"], "the recipe is missing"),
        (["train", "nothere.yaml"], "no such recipe file"),
        (["train", "seed=1", "lr=1e-6"], "did you mean actor.optim.lr?"),
        (["train", "actor.optim.lr=1,0"], 'actor.optim.lr="1,0"'),
        (["train", "demo", "--wrong"], "unrecognized"),
        (["train", "seed=1"], "model.path is missing"),
        (["train", "model.path=/nothere/m", "data.train_files=x.parquet"], "/nothere/m does not exist"),
        (["demo", "reward=exactly"], "did you mean exact?"),
        (["check", "seed=x"], "must be a whole number"),
    ],
)
def test_wrong_use_exits_2_in_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = fails(capsys, *words)
    assert code == 2
    assert said in message


def test_a_missing_data_file_exits_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, message = fails(
        capsys,
        "sft",
        f"model.path={tmp_path}",
        f"sft.files={tmp_path}/nothere.parquet",
        f"out={tmp_path}/run",
    )
    assert code == 3
    assert "nothere.parquet" in message
    assert not (tmp_path / "run").exists()


def test_debug_shows_the_traceback_and_stands_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["--debug", "train", "lr=1"],
        ["train", "--debug", "lr=1"],
        ["train", "lr=1", "--debug", "seed=1"],
    ):
        assert cli.main(words) == 2
        err = capsys.readouterr().err
        assert "Traceback" in err
        assert "error: command line: lr is unknown" in err


class OutOfMemoryError(RuntimeError):
    """Named as torch names its own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (e.ConfigError("x"), 2),
        (e.DataError("x"), 3),
        (e.GuardStop("x"), 4),
        (e.GateFailed("x"), 5),
        (e.CheckpointError("x"), 6),
        (e.EngineError("x"), 7),
        (e.UserCodeError("x"), 8),
        (e.OutOfMemory("x"), 9),
        (e.Interrupted("x", signal.SIGINT), 130),
        (e.Interrupted("x", signal.SIGTERM), 143),
        (KeyboardInterrupt(), 130),
        (e.Terminated("x"), 143),
        (OSError(errno.ENOSPC, "No space left on device", "/d/f"), 6),
        (OSError(errno.EACCES, "Permission denied", "/d/f"), 6),
        (OSError(errno.ENAMETOOLONG, "File name too long", "/d/f"), 6),
        (OSError(errno.ENOENT, "No such file or directory", "/proc/nope"), 6),
        (OSError(errno.ENOTDIR, "Not a directory", "/d/f/g"), 6),
        (MemoryError(), 9),
        (OutOfMemoryError("CUDA"), 9),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"), 9),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 9),
        (RuntimeError("other"), 1),
        (ValueError("other"), 1),
    ],
)
def test_each_error_has_its_exit_code_and_one_line(error: BaseException, code: int) -> None:
    found, message = cli.exit_code(error)
    assert found == code
    assert message
    assert "\n" not in message


def test_an_unexpected_error_says_how_to_see_more() -> None:
    assert "--debug" in cli.exit_code(ZeroDivisionError("division by zero"))[1]


def test_a_full_disk_says_where_and_what_to_do() -> None:
    _, message = cli.exit_code(OSError(errno.ENOSPC, "No space left on device", "/d/f"))
    assert message == "/d/f: No space left on device; free space, or write elsewhere with out=DIR"


def test_a_place_that_cannot_be_says_where_and_what_to_do() -> None:
    _, message = cli.exit_code(OSError(errno.ENOENT, "No such file or directory", "/proc/nope"))
    assert message == "/proc/nope: No such file or directory; check the path, or write elsewhere with out=DIR"


def test_every_error_of_ours_has_a_documented_code() -> None:
    documented = set(map(int, re.findall(r"\b(\d+)\b", cli.EPILOG)))
    for error in vars(e).values():
        if isinstance(error, type) and issubclass(error, e.ReinError) and "exit_code" in vars(error):
            assert error.exit_code in documented | {1}


def test_interrupting_a_stage_exits_130_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Ctrl-C while the demo is at work, whatever it is doing just then."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "rein", "demo", f"out={tmp_path}/run"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline()  # the first stage has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.count("\n") == 1, err
    assert "the same command goes on" in err
