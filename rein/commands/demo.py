"""`rein demo`: from nothing to a better model on two CPU cores, with nothing faked.

Makes the addition task's data and a fresh tiny model under the run folder, then runs the packaged recipe
demo.yaml. `reward=exact` (default) is the verifier, `noisy` accepts a fixed 40 % of the wrong answers,
`model` is a reward model trained on stored preference pairs. Accuracy is always measured against the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rein.config.load import load
from rein.config.recipe import Recipe
from rein.errors import ConfigError
from rein.tables import nearest
from rein.tracking.console import Console

EXACT = '{name: exact, options: {marker: "#"}}'
NOISY = '{name: noisy, options: {of: exact, options: {marker: "#"}, accept_wrong: 0.4}}'
REWARDS = {
    "exact": [f"score.reward={EXACT}"],
    "noisy": [f"score.reward={NOISY}"],
    "model": ["score.reward=model", "stages=[sft,reward,rollout,score,train,evaluate,export,report]"],
}
DEFAULT_OUT = "runs/demo"


def recipe_of(words: Sequence[str]) -> tuple[Recipe, list[str]]:
    """The demo's recipe for these words, and notes; raises ConfigError for an unknown reward."""
    given = dict(word.partition("=")[::2] for word in words)
    reward = given.pop("reward", "exact")
    if reward not in REWARDS:
        raise ConfigError(f"demo: reward={reward} is unknown; {nearest(reward, REWARDS)}")
    out = Path(given.get("out", DEFAULT_OUT))
    data = out / "data"
    made = {
        "out": str(out),
        "model.path": str(out / "base"),
        "data.val_files": str(data / "dev.parquet"),
        "sft.files": str(data / "demonstrations.parquet"),
        "reward.files": str(data / "pairs.parquet"),
        "rollout.files": str(data / "prompts.parquet"),
        "evaluate.files": str(data / "test.parquet"),
    }
    own = [*(f"{key}={value}" for key, value in made.items() if key not in given), *REWARDS[reward]]
    own = [word for word in own if word.partition("=")[0] not in given]
    return load("demo", [*own, *(word for word in words if not word.startswith("reward="))])


def run(words: Sequence[str], console: Console) -> None:
    """Make what the recipe needs, unless it is there, and run it."""
    recipe, notes = recipe_of(words)
    for note in notes:
        console.say(f"note: {note}")
    from rein.data import addition
    from rein.models.tiny import make_tiny
    from rein.runtime.lock import held
    from rein.stages import pipeline

    out = Path(recipe.out)
    with held(out):
        addition.write(out / "data", recipe.seed)
        base = Path(recipe.model.path or out / "base")
        if base == out / "base":
            make_tiny(base, seed=recipe.seed)
        pipeline.run(recipe, console)
