"""The keys a recipe may have, read off the Recipe itself, and the nearest one to a key that it may not have.

Knows names only: no values, no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from pydantic.fields import FieldInfo

from rein.config.recipe import Recipe, Section

# What other trainers call it -> our key, or its last words. Only names that a search by letters would miss.
ELSEWHERE = {
    "learning_rate": "optim.lr",
    "weight_decay_rate": "optim.weight_decay",
    "warmup_steps": "optim.lr_warmup_steps",
    "warmup_ratio": "optim.lr_warmup_steps_ratio",
    "lr_scheduler": "optim.lr_scheduler_type",
    "num_train_epochs": "trainer.total_epochs",
    "epochs": "trainer.total_epochs",
    "max_steps": "trainer.total_training_steps",
    "eval_steps": "trainer.test_freq",
    "save_steps": "trainer.save_freq",
    "batch_size": "data.train_batch_size",
    "per_device_train_batch_size": "actor.ppo_micro_batch_size",
    "mini_batch_size": "actor.ppo_mini_batch_size",
    "num_ppo_epochs": "actor.ppo_epochs",
    "max_grad_norm": "actor.grad_clip",
    "cliprange": "actor.clip_ratio",
    "clip_range": "reward_manager.clip_range",
    "vf_clip": "critic.cliprange_value",
    "kl_coef": "algorithm.kl_ctrl.kl_coef",
    "init_kl_coef": "algorithm.kl_ctrl.kl_coef",
    "beta": "actor.kl_loss_coef",
    "kl_estimator": "actor.kl_loss_type",
    "entropy_coef": "actor.entropy_coeff",
    "gae_lambda": "algorithm.lam",
    "lambda": "algorithm.lam",
    "discount": "algorithm.gamma",
    "model_name_or_path": "model.path",
    "model_name": "model.path",
    "model": "model.path",
    "r": "model.lora_rank",
    "gradient_checkpointing": "model.enable_gradient_checkpointing",
    "output_dir": "out",
    "out_dir": "out",
    "reward_fn": "score.reward",
    "num_generations": "rollout.n",
    "max_length": "data.max_response_length",
}


def _walk(model: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo, bool]]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield prefix + name, field, True
            yield from _walk(annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field, False


LEAVES: dict[str, FieldInfo] = {key: field for key, field, section in _walk(Recipe, "") if not section}
SECTIONS: frozenset[str] = frozenset(key for key, _, section in _walk(Recipe, "") if section)


def default_of(key: str) -> Any:
    """The value that the recipe has where nobody gives one."""
    value: Any = Recipe()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def takes_text_only(key: str) -> bool:
    """True for keys whose value is a name or path, so that a bare number given there is meant as text."""
    return LEAVES[key].annotation in (str, str | None)


def takes_bounds(key: str) -> bool:
    """True for thresholds that may be `lo_hi`, so that 2_3 is meant as bounds, not as the number 23."""
    return key.startswith("algorithm.rollout_correction.") and key.endswith("_threshold")


def _alike(a: str, b: str) -> float:
    return 1.0 if a == b else SequenceMatcher(None, a, b).ratio()


def nearest_key(unknown: str) -> str:
    """The words to append to "KEY is unknown": the nearest valid dotted key over all sections.

    The last word weighs most, for a key is more often in the wrong section than misspelled in every part.
    """
    unknown = unknown.replace("-", "_")
    section, _, last = unknown.rpartition(".")
    if last in ELSEWHERE:
        known = ELSEWHERE[last]
        own = f"{section}.{known}"
        if known not in LEAVES or own in LEAVES:
            known = own if own in LEAVES else f"actor.{known}"
        return f"did you mean {known}?"
    scored = [(_score(section, last, key), key) for key in LEAVES]
    best, key = max(scored, key=lambda pair: pair[0])
    if best > 0:
        return f"did you mean {key}?"
    if section in SECTIONS:
        inside = [key for key in LEAVES if key.rpartition(".")[0] == section]
        return f"{section} has {', '.join(key.rpartition('.')[2] for key in inside)}"
    return f"the sections are {', '.join(sorted(key for key in SECTIONS if '.' not in key))}"


def _score(section: str, last: str, key: str) -> float:
    """0 where the last words differ too much; the actor's key wins a tie, as the one most often meant."""
    key_section, _, key_last = key.rpartition(".")
    alike, inside = _alike(last, key_last), bool(section) and key.startswith(f"{section}.")
    if alike < (0.55 if inside else 0.7):
        return 0.0
    return (
        3 * alike
        + (alike == 1)
        + _alike(section, key_section)
        + inside
        + (0.3 if key.startswith("actor.") else 0.0)
    )
