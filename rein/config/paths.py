"""What feeds what: the files and folders each stage reads and writes, from the recipe alone.

A stage run by itself and a stage run by `rein run` resolve the same paths. An explicit key always wins; else
the output of an earlier stage of `stages`, else the recipe's own data and model. Opens nothing.
"""

from pathlib import Path

from rein.config.recipe import Recipe
from rein.errors import ConfigError

# Keys that say where something lies, not what it is: what lies there is compared by content.
PLACES = (
    *(
        "model.path",
        "data.train_files",
        "data.val_files",
        "data.behavior_model",
        "data.leave_out",
        "sft.files",
        "reward.files",
        "reward.path",
    ),
    *("rollout.files", "rollout.path", "score.files", "score.path", "critic.model.path"),
    *("evaluate.files", "evaluate.before", "evaluate.after", "export.path"),
)
CACHE = "rein-cache"


def stage_dir(recipe: Recipe, stage: str) -> Path:
    """Where a stage writes: `<out>/<stage>`."""
    return Path(recipe.out) / stage


def _earlier(recipe: Recipe, producer: str, consumer: str) -> bool:
    stages = list(recipe.stages)
    if producer not in stages:
        return False
    return consumer not in stages or stages.index(producer) < stages.index(consumer)


def base_model(recipe: Recipe) -> str:
    """The model the recipe names: what sft starts from."""
    if recipe.model.path is None:
        raise ConfigError("recipe: model.path is missing; give the folder of the model to start from")
    return recipe.model.path


def start_policy(recipe: Recipe, stage: str) -> str:
    """What train starts from, and the reference: sft's result if the recipe has sft, else model.path."""
    if _earlier(recipe, "sft", stage):
        return str(stage_dir(recipe, "sft") / "model")
    return base_model(recipe)


def rollout_policy(recipe: Recipe) -> str:
    return recipe.rollout.path or start_policy(recipe, "rollout")


def reward_trunk(recipe: Recipe) -> str:
    return recipe.reward.path or start_policy(recipe, "reward")


def critic_start(recipe: Recipe) -> str:
    return recipe.critic.model.path or start_policy(recipe, "train")


def reward_model(recipe: Recipe) -> str:
    """The reward model that the reward named `model` uses."""
    if recipe.score.path:
        return recipe.score.path
    if "reward" in recipe.stages:
        return str(stage_dir(recipe, "reward") / "model")
    raise ConfigError(
        "recipe: score.reward is `model` but score.path is missing; "
        "give the reward model's folder, or add reward to stages"
    )


def _files(given: list[str], recipe: Recipe, stage: str) -> list[str]:
    files = given or recipe.data.train_files
    if not files:
        raise ConfigError(f"recipe: {stage}.files is missing; give the Parquet or JSONL files to read")
    return list(files)


def sft_files(recipe: Recipe) -> list[str]:
    return _files(recipe.sft.files, recipe, "sft")


def mixed_files(recipe: Recipe) -> list[str]:
    """The demonstrations that train mixes in; never data.train_files, which are trajectories."""
    return list(recipe.sft.files) if recipe.sft.share else []


def reward_files(recipe: Recipe) -> list[str]:
    return _files(recipe.reward.files, recipe, "reward")


def rollout_files(recipe: Recipe) -> list[str]:
    return _files(recipe.rollout.files, recipe, "rollout")


def score_files(recipe: Recipe) -> list[str]:
    if not recipe.score.files and _earlier(recipe, "rollout", "score"):
        return [str(stage_dir(recipe, "rollout") / "trajectories.parquet")]
    return _files(recipe.score.files, recipe, "score")


def train_files(recipe: Recipe) -> list[str]:
    for producer in ("score", "rollout"):
        if _earlier(recipe, producer, "train"):
            return [str(stage_dir(recipe, producer) / "trajectories.parquet")]
    if not recipe.data.train_files:
        raise ConfigError("recipe: data.train_files is missing; give the trajectories to train on")
    return list(recipe.data.train_files)


def evaluate_files(recipe: Recipe) -> list[str]:
    if not recipe.evaluate.generate:
        return train_files(recipe)
    files = recipe.evaluate.files or recipe.data.val_files
    if not files:
        raise ConfigError("recipe: evaluate.files is missing; give prompts that training has not seen")
    return list(files)


def trained_actor(recipe: Recipe) -> str:
    """What evaluate and export take as the result."""
    return str(stage_dir(recipe, "train") / "best")


def export_source(recipe: Recipe) -> str:
    """What is exported: as said, else what the stage that makes this kind of model has left."""
    made = {
        "actor": trained_actor(recipe),
        "critic": str(stage_dir(recipe, "train") / "critic"),
        "reward": recipe.score.path or str(stage_dir(recipe, "reward") / "model"),
    }
    return recipe.export.path or made[recipe.export.kind]


def export_target(recipe: Recipe) -> Path:
    name = "model" if recipe.export.kind == "actor" else recipe.export.kind
    return Path(recipe.export.to) if recipe.export.to else stage_dir(recipe, "export") / name


def behavior_model(recipe: Recipe) -> list[str]:
    """The model whose log-probs train recomputes as the behavior's; none where it does not."""
    return [recipe.data.behavior_model] if recipe.data.behavior_model else []


def cache_dir(recipe: Recipe) -> Path:
    """What frozen models said of rows: by default beside the run folder, for all runs that lie there."""
    return Path(recipe.cache).expanduser() if recipe.cache else Path(recipe.out).absolute().parent / CACHE
