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
from rein.verbs import ACTIONS, COMMANDS, EPILOG, EXAMPLES, OPTIONS, STAGES

if TYPE_CHECKING:
    from rein.config.recipe import Recipe
    from rein.tracking.console import Console

ATOMIC = ("convert", "audit", "check", "cache", "deploy", "ui")  # no stages: there are none to keep
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
    if arguments.verb == "deploy":
        from rein.commands.deploy import run as deploy

        deploy(arguments.model, arguments.to, console, rollback=arguments.rollback, listed=arguments.listed)
        return
    if arguments.verb == "ui":
        from rein.commands.ui import run as ui

        ui(arguments.folder, arguments.host, arguments.port, console)
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

    source, words = arguments.recipe, list(arguments.words)
    if getattr(arguments, "force", False):
        words.append("export.force=true")
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
        _arguments(sub, verb)
    return parser


def _arguments(sub: _Parser, verb: str) -> None:
    """What a verb takes."""
    for option, (value, does) in OPTIONS.get(verb, {}).items():
        if option == "--against":
            sub.add_argument(option, metavar=value, help=does, action="append", default=[])
        else:
            sub.add_argument(option, metavar=value, help=does)
    if verb == "audit":
        what = "Parquet or JSON files, globs, folders, or a recipe; and key=value"
        sub.add_argument("words", metavar="DATA", nargs="+", help=what)
        return
    if verb == "convert":
        sub.add_argument("--force", action="store_true", help="overwrite OUT where it exists")
        sub.add_argument("files", metavar="FILE", nargs="+", help="files, globs or folders, then OUT")
        return
    if verb == "deploy":
        sub.add_argument("--rollback", action="store_true", help="go back to what was current before")
        sub.add_argument("--list", dest="listed", action="store_true", help="the versions, with gates")
        sub.add_argument("model", metavar="MODEL", nargs="?", help="an exported model folder")
        return
    if verb == "ui":
        sub.add_argument("folder", metavar="DIR", nargs="?", help="the folder of runs (default: runs)")
        return
    if verb in ("export", "run"):
        sub.add_argument(
            "--force", action="store_true", help="export what did not pass the gate; it is recorded"
        )
    if verb == "cache":
        sub.add_argument("action", choices=("ls", "prune"), help="list what is kept, or remove some of it")
        sub.add_argument("--all", action="store_true", help="prune everything")
        sub.add_argument("--dry-run", action="store_true", help="say what would go, and leave it")
    if verb != "demo":
        text, needed = "a YAML file, or the name of a packaged recipe", verb != "cache"
        sub.add_argument("recipe", metavar="RECIPE", help=text, nargs=None if needed else "?")
    sub.add_argument("words", metavar="key=value", nargs="*", help="override a key, e.g. seed=3 out=runs/x")
    if verb == "check":
        sub.add_argument(
            "--try",
            dest="rehearse",
            action="store_true",
            help="also run two updates on 16 of the real rows and throw them away",
        )


if __name__ == "__main__":
    raise SystemExit(main())
