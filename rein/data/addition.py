"""The demo's made data: three-digit addition with the steps written out, by a worker who forgets carries.

"347+258=" is answered "7+8+0=15;4+5+1=10;3+2+1=6#605": units first, each step digit + digit + carry = sum,
then the number. A demonstration forgets the carry out of a column often where the column's sum is 10 to 14
and seldom above; the next step then adds 0 and all later digits follow from it. Everything follows from the
seed; the test problems are the same for every seed and are in no other file. Knows no tokenizer and no
model.
"""

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import numpy as np

from rein.data import schemas
from rein.data.parquet import write_rows

Problem = tuple[int, int]
Rng = np.random.Generator
Forgets = Callable[[int], bool]  # the column's sum -> is its carry forgotten?

DATA_SOURCE = "addition"
LOWEST, ABOVE = 100, 1000
P_HARD = 0.75  # the carry is forgotten when the column's sum is 10 to 14
P_EASY = 0.05  # and when it is 15 or more
HARD_SUMS = range(10, 15)
TEST_SEED = 40_000_003
_STREAMS = ("dev", "prompts", "demonstrations", "pairs", "mistakes", "rejected")


def problems(n: int, seed: int, exclude: Set[Problem] = frozenset()) -> list[Problem]:
    """n different problems, none of them in `exclude`; a + b and b + a count as one problem."""
    return _draw(n, np.random.default_rng(seed), exclude)


def correct(a: int, b: int) -> str:
    """The answer with every carry right."""
    return _worked(a, b, lambda total: False)


def demonstration(a: int, b: int, rng: Rng, *, p_hard: float = P_HARD, p_easy: float = P_EASY) -> str:
    """The answer of a worker who forgets carries."""

    def forgets(total: int) -> bool:
        return bool(rng.random() < (p_hard if total in HARD_SUMS else p_easy))

    return _worked(a, b, forgets)


def has_carry(a: int, b: int) -> bool:
    """Whether a carry goes into the tens or the hundreds: else there is nothing to forget."""
    return a % 10 + b % 10 >= 10 or a % 100 + b % 100 >= 100


def question(a: int, b: int) -> str:
    return f"{a}+{b}="


def prompt_row(a: int, b: int, split: str, index: int) -> dict[str, Any]:
    """A problem in verl's layout."""
    return {
        schemas.PROMPT: [{"role": "user", "content": question(a, b)}],
        schemas.DATA_SOURCE: DATA_SOURCE,
        schemas.ABILITY: "math",
        schemas.REWARD_MODEL: {"style": "rule", schemas.GROUND_TRUTH: str(a + b)},
        schemas.EXTRA_INFO: {"split": split, "index": index},
    }


def sft_row(a: int, b: int, rng: Rng) -> dict[str, Any]:
    """A demonstration to imitate, right or wrong."""
    return {schemas.PROMPT: question(a, b), schemas.RESPONSE: demonstration(a, b, rng)}


def pair_row(a: int, b: int, rng: Rng) -> dict[str, Any]:
    """The right answer, and one that forgets at least one carry; the problem must have a carry."""
    right = wrong = correct(a, b)
    while wrong == right:
        wrong = demonstration(a, b, rng)
    truth = {"style": "rule", schemas.GROUND_TRUTH: str(a + b)}
    return {
        schemas.PROMPT: question(a, b),
        schemas.CHOSEN: right,
        schemas.REJECTED: wrong,
        schemas.DATA_SOURCE: DATA_SOURCE,
        schemas.REWARD_MODEL: truth,
    }


def write(
    folder: Path | str,
    seed: int,
    *,
    demonstrations: int = 6000,
    prompts: int = 480,
    dev: int = 200,
    test: int = 500,
    pairs: int = 3000,
) -> dict[str, int]:
    """Write demonstrations, prompts, dev, test and pairs .parquet; returns rows by file name.

    Test, dev and prompts are disjoint from each other and from the rest. Demonstrations and pairs may share
    problems.
    """
    folder = Path(folder)
    streams = np.random.SeedSequence(seed).spawn(len(_STREAMS))
    rng = {name: np.random.default_rng(stream) for name, stream in zip(_STREAMS, streams, strict=True)}
    tested = problems(test, TEST_SEED)
    taken = set(tested)
    drawn = {"test": tested}
    for name, count in (("dev", dev), ("prompts", prompts)):
        drawn[name] = _draw(count, rng[name], taken)
        taken |= set(drawn[name])
    shown = _draw(demonstrations, rng["demonstrations"], taken)
    compared = _draw(pairs, rng["pairs"], taken, carry=True)

    wrote = {
        f"{name}.parquet": write_rows(
            folder / f"{name}.parquet",
            [prompt_row(a, b, name, index) for index, (a, b) in enumerate(found)],
            schemas.PROMPTS,
        )
        for name, found in drawn.items()
    }
    sft = [sft_row(a, b, rng["mistakes"]) for a, b in shown]
    wrote["demonstrations.parquet"] = write_rows(folder / "demonstrations.parquet", sft, schemas.SFT)
    preferences = [pair_row(a, b, rng["rejected"]) for a, b in compared]
    wrote["pairs.parquet"] = write_rows(folder / "pairs.parquet", preferences, schemas.PREFERENCES)
    return wrote


def _draw(n: int, rng: Rng, exclude: Set[Problem], *, carry: bool = False) -> list[Problem]:
    seen = {_unordered(problem) for problem in exclude}
    found: list[Problem] = []
    while len(found) < n:
        a, b = (int(number) for number in rng.integers(LOWEST, ABOVE, size=2))
        if _unordered((a, b)) not in seen and (has_carry(a, b) or not carry):
            seen.add(_unordered((a, b)))
            found.append((a, b))
    return found


def _unordered(problem: Problem) -> Problem:
    return min(problem), max(problem)


def _worked(a: int, b: int, forgets: Forgets) -> str:
    """The steps and the number; `forgets` is asked for every carry that goes into a further column."""
    steps, digits, carry = list[str](), list[str](), 0
    columns = list(zip(reversed(str(a)), reversed(str(b)), strict=True))
    for place, (x, y) in enumerate(columns):
        total = int(x) + int(y) + carry
        steps.append(f"{x}+{y}+{carry}={total}")
        last = place == len(columns) - 1
        digits.append(str(total if last else total % 10))
        carry = 1 if total >= 10 and not last and not forgets(total) else 0
    return ";".join(steps) + "#" + "".join(reversed(digits))
