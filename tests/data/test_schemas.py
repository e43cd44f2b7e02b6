"""Claims about names of columns and kinds of files."""

import numpy as np
import pyarrow as pa
import pytest

from rein.data import schemas
from rein.errors import DataError
from rein.types import Trajectory


@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        (["prompt", "data_source", "reward_model"], "prompts"),
        (["prompt", "response"], "trajectories"),
        (["prompt_ids", "response_ids", "score"], "trajectories"),
        (["prompt", "chosen", "rejected"], "preferences"),
        (["chosen", "rejected"], "preferences"),
        (["messages"], "sft"),
    ],
)
def test_the_columns_say_what_a_file_holds(columns: list[str], kind: str) -> None:
    assert schemas.kind_of(columns) == kind


def test_columns_of_no_kind_are_answered_with_the_nearest_name() -> None:
    with pytest.raises(DataError, match="did you mean `question`"):
        schemas.kind_of(["question", "id"])


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (["rollout_log_probs"], "did you mean `rollout_log_probs`? rename it to `behavior_log_probs`"),
        (["behaviour_logprobs", "x"], "did you mean `behaviour_logprobs`?"),
        (["x", "y"], "it has x, y"),
        ([], "it has no columns"),
    ],
)
def test_a_missing_column_is_answered_with_what_is_there(present: list[str], said: str) -> None:
    assert said in str(schemas.missing("a.parquet", "behavior_log_probs", present))


@pytest.mark.parametrize("schema", [schemas.PROMPTS, schemas.TRAJECTORIES, schemas.PREFERENCES, schemas.SFT])
def test_every_schema_names_its_kind_and_version(schema: pa.Schema) -> None:
    kind, version = schema.metadata[schemas.SCHEMA_KEY].decode().split("/")
    assert (schemas.kind_of(schema.names) == kind) or kind == "sft"  # prompt + response reads as both
    assert version == "1"


def test_a_trajectory_has_a_place_in_every_column_it_needs() -> None:
    row = Trajectory("a row 0", "p", np.array([1]), np.array([2]), np.array([True]))
    assert set(schemas.trajectory_row(row)) <= set(schemas.TRAJECTORIES.names)
