"""Each table walked: two updates of the tiny model with every entry, chosen in a recipe as a user would."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from e2e_run import metrics, recipe, rein, same_weights, weights, write_recipe

from rein.config.methods import ESTIMATORS, LOSSES, METHODS, READ_NO_ADVANTAGES
from rein.functional.kl import EXACT_KINDS, KINDS, OFF_POLICY
from rein.functional.losses.aggregate import MODES
from rein.functional.presets import PRESETS, REJECTIONS
from rein.functional.rewards import PLACEMENTS

pytestmark = pytest.mark.slow
CORRECTION = "algorithm.rollout_correction"


@pytest.fixture(scope="module")
def rows(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole run's scored rows, each prompt's two scored differently, with a baseline score."""
    table = pq.read_table(whole / "score" / "trajectories.parquet")
    scores = [float(i % 2) for i in range(table.num_rows)]
    for name, values in (("score", scores), ("baseline_score", [0.5] * table.num_rows)):
        column = pa.array(values, pa.float64())
        at = table.schema.get_field_index(name)
        table = table.append_column(name, column) if at < 0 else table.set_column(at, name, column)
    file = tmp_path_factory.mktemp("rows") / "trajectories.parquet"
    pq.write_table(table, file)
    return file


@dataclasses.dataclass
class Case:
    """Words added to the recipe."""

    words: list[str]

    def __str__(self) -> str:
        return " ".join(self.words) or "defaults"


def of(template: str, names: Any) -> list[Case]:
    return [Case(template.format(name).split()) for name in names]


_REJECT = {"k1": "0.5_2.0", "k2": "0.5", "k3": "0.5"}
_CHOSEN = ("nll", *READ_NO_ADVANTAGES)
CASES = [
    *of("algorithm.method={}", METHODS),
    *of("actor.policy_loss.loss_mode={}", sorted(set(LOSSES) - {"dro", "sppo", *_CHOSEN})),
    Case(["actor.policy_loss.loss_mode=dro", "actor.policy_loss.dro_beta=0.1"]),
    *of("algorithm.adv_estimator={}", ESTIMATORS),
    *of("actor.kl_loss_type={} algorithm.insist=true", (*KINDS, *EXACT_KINDS, OFF_POLICY)),
    *of(
        "algorithm.use_kl_in_reward=true algorithm.insist=true algorithm.kl_penalty={}",
        (*KINDS, *EXACT_KINDS),
    ),
    *of("actor.loss_agg_mode={}", MODES),
    *of(CORRECTION + ".preset={}", PRESETS),
    *[
        Case([f"{CORRECTION}.rollout_rs={name}", f"{CORRECTION}.rollout_rs_threshold={_REJECT[name[-2:]]}"])
        for name in REJECTIONS
    ],
    *of(
        CORRECTION + ".rollout_is={} " + CORRECTION + ".rollout_is_batch_normalize=true",
        ["token", "sequence"],
    ),
    *[
        Case(
            [
                f"reward_manager.placement={name}",
                *(["reward_manager.placement_decay=0.9"] * (name == "exponential")),
            ]
        )
        for name in PLACEMENTS
    ],
    *of(
        "{}",
        (
            "reward_manager.normalize=dataset",
            "reward_manager.clip_range=[-2,2]",
            "reward_manager.missing_eos_penalty=1",
            "reward_manager.overlong_buffer.enable=true reward_manager.overlong_buffer.len=8",
            "reward_manager.length_penalty=0.01",
            "reward_manager.repetition_penalty=0.5",
        ),
    ),
    *of("actor.entropy_coeff={}", [0.01]),
    *of("actor.policy_loss.opsm_threshold={}", [0.001]),
    *of("algorithm.filter_groups.enable={}", ["true"]),
    Case(["algorithm.kl_ctrl.type=adaptive"]),
    Case(["algorithm.kl_ctrl.type=moving_average"]),
    Case(
        [
            "algorithm.kl_ctrl.type=schedule",
            "algorithm.kl_ctrl.schedule=[[0, 0.08], [0.2, 0.05], [0.8, 0.06]]",
        ]
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_updates_move_the_weights_and_stay_finite(
    case: Case, whole: Path, data: Path, rows: Path, tmp_path: Path
) -> None:
    start, out = whole / "sft" / "model", tmp_path / "run"
    body = recipe(start, data, out) | {"stages": ["train"]}
    body["data"]["train_files"] = str(rows)
    body["data"]["train_batch_size"] = 16
    body["actor"] |= {"ppo_mini_batch_size": 16, "ppo_epochs": 1}
    body["trainer"] = {
        "critic_warmup": 1,
        "total_training_steps": 2,
        "val_before_train": False,
        "val_prompts": 2,
    }
    assert rein("run", write_recipe(tmp_path / "recipe.yaml", body), *case.words) == 0
    last = out / "train" / "last"
    assert not same_weights(start, last)
    assert all(torch.isfinite(tensor).all() for tensor in weights(last).values())
    numbers = [value for line in metrics(out) for value in line.values() if isinstance(value, float)]
    assert numbers
    assert np.isfinite([value for value in numbers if value == value]).all()
