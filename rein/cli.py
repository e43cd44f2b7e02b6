"""The command line: `rein VERB RECIPE [key=value ...]` in, work done and an exit code out.

Stages and commands are imported only when they run, so help is instant. An error is one line on stderr; its
class decides the exit code. Knows no stage's insides.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from rein import __version__
from rein.errors import ConfigError, ReinError, Terminated, is_out_of_memory
from rein.runtime import torchrun

if TYPE_CHECKING:
    from rein.config.recipe import Recipe
    from rein.tracking.console import Console

STAGES = {
    "sft": "fine-tune on prompt + response or chat messages",
    "reward": "train a reward model from preference pairs",
    "rollout": "stored prompts -> trajectories with token ids and log-probs",
    "score": "score trajectories: rules, a reward model, your function",
    "train": "offline PPO: scored trajectories -> a better actor",
    "evaluate": "accuracy before and after on fresh prompts, with interval",
    "export": "the result as a Hugging Face folder",
    "report": "one HTML page: curves, before and after, samples",
}
COMMANDS = {
    "run": "the recipe's stages in order, skipping what is done",
    "demo": "from nothing to a better model, here, in minutes",
    "check": "print the plan and a memory estimate, loading no weights",
    "convert": "files of verl, TRL, OpenRLHF, LLaMA-Factory, OpenAI, vLLM -> Rein's",
    "cache": "what frozen models said, kept for all runs: list it (ls), make room (prune)",
    "audit": "what data files hold and what is wrong with them, on one page",
}
EXAMPLES = {
    "sft": "rein sft recipe.yaml sft.optim.lr=1e-5",
    "reward": "rein reward recipe.yaml reward.files=pairs.parquet",
    "rollout": "rein rollout recipe.yaml rollout.n=8 rollout.temperature=0.7",
    "score": "rein score recipe.yaml score.reward=my_pkg.rewards:politeness",
    "train": "rein train recipe.yaml data.train_batch_size=256 actor.optim.lr=1e-6 out=runs/first",
    "evaluate": "rein evaluate recipe.yaml evaluate.files=test.parquet",
    "export": "rein export recipe.yaml export.to=models/better",
    "report": "rein report recipe.yaml",
    "run": "rein run recipe.yaml seed=1 out=runs/seed1",
    "demo": "rein demo reward=noisy seed=1",
    "check": "rein check recipe.yaml --try",
    "convert": "rein convert rollouts/*.jsonl trajectories.parquet --from verl",
    "cache": "rein cache prune recipe.yaml --older-than 30 --dry-run",
    "audit": "rein audit trajectories.parquet --model MODEL --against test.parquet out=runs/first",
}
EPILOG = """\
RECIPE is a YAML file or the name of a packaged one (demo); key=value overrides it, and alone makes a recipe.
exit codes: 0 done, 2 usage or recipe, 3 data, 4 stopped or paused by a guard, 5 gate failed,
6 snapshot or disk, 7 engine or rank, 8 your function raised, 9 out of memory, 130/143 interrupted (saved)
"""
ACTIONS = ("ls", "prune")  # of cache
OPTIONS: dict[str, dict[str, tuple[str, str]]] = {  # of a verb, with a value: what it takes, what it does
    "convert": {
        "--from": (
            "FORMAT",
            "verl, trl, openrlhf, llamafactory, openai, vllm, solutions, rein; auto (default) looks",
        ),
        "--to": ("KIND", "prompts, trajectories, preferences or sft; else what the rows are"),
        "--limit": ("N", "read the first N rows only"),
        "--max-bad-fraction": ("F", "stop where more rows than this cannot be used (default 0.01)"),
        "--temperature": ("T", "what rows that store no temperature were sampled at"),
        "--log-probs": (
            "MODE",
            "at a temperature other than 1: raw (taken at 1) or processed (taken at that one)",
        ),
    },
    "audit": {
        "--model": ("PATH", "model folder: what it says of the rows, and a verdict (model.path)"),
        "--against": ("FILE", "evaluation prompts (evaluate.files)"),
    },
    "cache": {
        "--older-than": ("DAYS", "prune what was not used for so many days"),
        "--max-size": ("SIZE", "prune what was used longest ago until the rest is no larger, such as 10GB"),
    },
}
ATOMIC = ("convert", "audit", "check", "cache")  # no stages: there are none to keep
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES)
_PATH = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM)


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest verb."""

    def error(self, message: str) -> NoReturn:
        if "invalid choice" in message:
            word = message.split("'")[1]
            verbs = ACTIONS if self.prog.endswith(" cache") else (*STAGES, *COMMANDS)
            close = get_close_matches(word, verbs, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(verbs)}"
            message = f"{word} is no verb; {hint}"
        if "required: action" in message:
            message = f"it is not said what to do; write {' or '.join(ACTIONS)}"
        if "required: DATA" in message:
            message = "the data is missing; give Parquet or JSON files, or a recipe that names them"
        if "required: RECIPE" in message:
            message = "the recipe is missing; give a YAML file, a packaged name or key=value words"
        raise ConfigError(f"{self.prog}: {message.removesuffix('.')} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; no traceback without --debug."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if torchrun.follows():
        from rein.runtime.launch import follow

        follow()
    former = signal.signal(signal.SIGTERM, _terminate)
    try:
        if not words:
            _parser().print_help(sys.stderr)
            return 2
        # Options may stand anywhere: argparse wants them before a list of words.
        rest = sorted(_with_values(words[1:]), key=lambda w: not w.startswith("-"))
        _dispatch(_parser().parse_args([*words[:1], *rest]))
        if torchrun.started() > 1:
            from rein.runtime.launch import dismiss

            dismiss()
    except (Exception, KeyboardInterrupt, Terminated) as error:
        if debug:
            traceback.print_exc()
        code, message = exit_code(error)
        if code in (130, 143) and words[0] in ATOMIC:
            message = f"{message.partition(':')[0]}: nothing is written half; give the same command again"
        if message:
            print(f"error: {message}", file=sys.stderr)
        return code
    finally:
        signal.signal(signal.SIGTERM, former)
    return 0


def _with_values(words: Sequence[str]) -> Iterator[str]:
    """The words, with each option that takes a value joined to it: --from trl is --from=trl."""
    found = iter(words)
    for word in found:
        value = next(found, None) if any(word in options for options in OPTIONS.values()) else None
        yield word if value is None else f"{word}={value}"


def exit_code(error: BaseException) -> tuple[int, str]:
    """The exit code of an error and what to say of it in one line."""
    message = " ".join(str(error).split())
    if isinstance(error, ReinError | Terminated):
        return error.exit_code, message
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted: finished stages are kept; the same command goes on from there"
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141, ""
    if is_out_of_memory(error):
        return 9, f"out of memory: {message or 'no detail'}; lower ppo_max_token_len_per_gpu or batch_size"
    if isinstance(error, OSError) and error.errno in _DISK:
        return 6, f"{error.filename or 'disk'}: {error.strerror}; free space, or write elsewhere with out=DIR"
    if isinstance(error, OSError) and error.errno in _PATH:
        return (
            6,
            f"{error.filename or 'path'}: {error.strerror}; check the path, or write elsewhere with out=DIR",
        )
    return 1, f"unexpected {type(error).__name__}: {message}; run again with --debug to see where"


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated("terminated: finished stages are kept; the same command goes on from there")


def _dispatch(arguments: argparse.Namespace) -> None:
    from rein.tracking.console import Console

    console = Console()
    if arguments.verb == "demo":
        from rein.commands.demo import run as demo

        demo(arguments.words, console)
        return
    if arguments.verb == "convert":
        from rein.commands.convert import run_words

        run_words(arguments, console)
        return
    if arguments.verb == "audit":
        from rein.commands.audit import run as audit

        audit(arguments.words, console, model=arguments.model, against=arguments.against)
        return
    recipe = _recipe(arguments, console)
    if arguments.verb == "cache":
        from rein.commands.cache import run as cache

        cache(
            arguments.action,
            recipe,
            console,
            older_than=arguments.older_than,
            max_size=arguments.max_size,
            everything=arguments.all,
            dry_run=arguments.dry_run,
        )
        return
    if arguments.verb == "check":
        from rein.commands.check import run as check

        check(recipe, console, rehearse=arguments.rehearse)
        return
    from rein.stages import pipeline

    if arguments.verb == "run":
        pipeline.run(recipe, console)
    else:
        pipeline.run_stage(arguments.verb, recipe, console)


def _recipe(arguments: argparse.Namespace, console: Console) -> Recipe:
    from rein.config.load import load

    source, words = arguments.recipe, arguments.words
    if source is not None and "=" in source and not os.path.exists(source):
        source, words = None, [source, *words]
    recipe, notes = load(source, words)
    for note in notes:
        console.say(f"note: {note}")
    return recipe


def _parser() -> _Parser:
    shared = _Parser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(
        prog="rein",
        description="Train language models with PPO actor-critic from data you already have.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    parser.add_argument("--version", action="version", version=f"rein {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", title="verbs")
    for verb, phrase in (STAGES | COMMANDS).items():
        sub = verbs.add_parser(
            verb,
            help=phrase,
            description=f"{phrase[0].upper()}{phrase[1:]}.",
            epilog=f"example: {EXAMPLES[verb]}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=[shared],
        )
        for option, (value, does) in OPTIONS.get(verb, {}).items():
            if option == "--against":
                sub.add_argument(option, metavar=value, help=does, action="append", default=[])
            else:
                sub.add_argument(option, metavar=value, help=does)
        if verb == "audit":
            what = "Parquet or JSON files, globs, folders, or a recipe; and key=value"
            sub.add_argument("words", metavar="DATA", nargs="+", help=what)
            continue
        if verb == "convert":
            sub.add_argument("--force", action="store_true", help="overwrite OUT where it exists")
            sub.add_argument("files", metavar="FILE", nargs="+", help="files, globs or folders, then OUT")
            continue
        if verb == "cache":
            sub.add_argument(
                "action", choices=("ls", "prune"), help="list what is kept, or remove some of it"
            )
            sub.add_argument("--all", action="store_true", help="prune everything")
            sub.add_argument("--dry-run", action="store_true", help="say what would go, and leave it")
        if verb != "demo":
            text, needed = "a YAML file, or the name of a packaged recipe", verb != "cache"
            sub.add_argument("recipe", metavar="RECIPE", help=text, nargs=None if needed else "?")
        sub.add_argument(
            "words", metavar="key=value", nargs="*", help="override a key, e.g. seed=3 out=runs/x"
        )
        if verb == "check":
            sub.add_argument(
                "--try",
                dest="rehearse",
                action="store_true",
                help="also run two updates on 16 of the real rows and throw them away",
            )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
