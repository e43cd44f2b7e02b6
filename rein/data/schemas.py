"""What the files between stages look like: each kind's Arrow schema, its version, every column's name.

A schema's fields are fixed (ids, log-probs, score) or free (prompt, extra_info): a free field is stored
with the type its values have, or as JSON text where they share none. Knows no file and no row:
data/parquet.py reads and writes with these.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, Final, Literal

import pyarrow as pa

from rein.errors import DataError, shown
from rein.types import Trajectory

Kind = Literal["prompts", "trajectories", "preferences", "sft"]

VERSION: Final = 1
SCHEMA_KEY: Final = b"rein.schema"  # file metadata: "trajectories/1"
JSON_KEY: Final = b"rein.json"  # file metadata: JSON list of the columns that hold JSON text
FREE_KEY: Final = b"rein.free"  # field metadata: the type follows the values

PROMPT: Final = "prompt"
DATA_SOURCE: Final = "data_source"
ABILITY: Final = "ability"
REWARD_MODEL: Final = "reward_model"
GROUND_TRUTH: Final = "ground_truth"  # inside reward_model; read as a column of its own too
EXTRA_INFO: Final = "extra_info"
RESPONSE: Final = "response"
PROMPT_IDS: Final = "prompt_ids"
RESPONSE_IDS: Final = "response_ids"
RESPONSE_MASK: Final = "response_mask"
BEHAVIOR_LOG_PROBS: Final = "behavior_log_probs"
SCORE: Final = "score"
TOKEN_LEVEL_SCORES: Final = "token_level_scores"
TURN_SCORES: Final = "turn_scores"  # one number for each assistant turn of the response, on its last token
BASELINE_SCORE: Final = "baseline_score"
FINISH_REASON: Final = "finish_reason"
TEMPERATURE: Final = "temperature"
TOP_P: Final = "top_p"
BEHAVIOR_POLICY: Final = "behavior_policy"
POLICY_VERSION: Final = "policy_version"
GROUP: Final = "group"
CHOSEN: Final = "chosen"
REJECTED: Final = "rejected"
MARGIN: Final = "margin"
MESSAGES: Final = "messages"
TOOLS: Final = "tools"  # functions the chat template is told of, as JSON schemas or the text of these
NAMES_SHOWN: Final = 30
ROW_KEY: Final = "row_key"
VALUES: Final = "values"


def _free(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata={FREE_KEY: b"1"})


def _schema(kind: str, fields: Sequence[pa.Field]) -> pa.Schema:
    return pa.schema(fields, metadata={SCHEMA_KEY: f"{kind}/{VERSION}".encode()})


_TRUTH = [
    pa.field(DATA_SOURCE, pa.string()),
    pa.field(ABILITY, pa.string()),
    _free(REWARD_MODEL),
    _free(EXTRA_INFO),
]

PROMPTS: Final = _schema("prompts", [_free(PROMPT), _free(TOOLS), *_TRUTH])
TRAJECTORIES: Final = _schema(
    "trajectories",
    [
        _free(PROMPT),
        _free(RESPONSE),
        pa.field(PROMPT_IDS, pa.list_(pa.int64())),
        pa.field(RESPONSE_IDS, pa.list_(pa.int64())),
        pa.field(RESPONSE_MASK, pa.list_(pa.bool_())),
        pa.field(BEHAVIOR_LOG_PROBS, pa.list_(pa.float32())),
        pa.field(SCORE, pa.float64()),
        pa.field(TOKEN_LEVEL_SCORES, pa.list_(pa.float32())),
        pa.field(TURN_SCORES, pa.list_(pa.float32())),
        pa.field(BASELINE_SCORE, pa.float64()),
        pa.field(FINISH_REASON, pa.string()),
        pa.field(TEMPERATURE, pa.float64()),
        pa.field(TOP_P, pa.float64()),
        pa.field(BEHAVIOR_POLICY, pa.string()),
        pa.field(POLICY_VERSION, pa.int64()),
        pa.field(GROUP, pa.string()),
        _free(TOOLS),
        *_TRUTH,
    ],
)
PREFERENCES: Final = _schema(
    "preferences",
    [
        *(_free(name) for name in (PROMPT, CHOSEN, REJECTED)),
        pa.field(MARGIN, pa.float64()),
        _free(TOOLS),
        *_TRUTH,
    ],
)
SFT: Final = _schema("sft", [*(_free(name) for name in (MESSAGES, PROMPT, RESPONSE, TOOLS)), *_TRUTH])
CACHE: Final = _schema("cache", [pa.field(ROW_KEY, pa.string()), pa.field(VALUES, pa.list_(pa.float32()))])

# Names that other tools give to our columns; used in messages only, never read silently.
ALIASES: Final[dict[str, tuple[str, ...]]] = {
    PROMPT: ("question", "query", "instruction", "input", "problem", "raw_prompt", "conversations"),
    RESPONSE: ("responses", "completion", "output", "answer", "generated_text", "solution"),
    RESPONSE_IDS: ("responses_ids", "output_ids", "completion_ids", "token_ids"),
    BEHAVIOR_LOG_PROBS: (
        "rollout_log_probs",
        "log_probs",
        "logprobs",
        "old_log_probs",
        "behaviour_log_probs",
    ),
    SCORE: ("reward", "rewards", "acc", "is_correct", "seq_level_scores"),
    TURN_SCORES: ("turn_rewards", "step_rewards", "turn_level_rewards"),
    CHOSEN: ("preferred", "accepted", "response_chosen"),
    REJECTED: ("dispreferred", "response_rejected"),
    MESSAGES: ("conversations", "conversation"),
}


def kind_of(column_names: Iterable[str]) -> Kind:
    """What a file with these columns holds; prompt + response is called trajectories, and sft reads it too.

    Raises DataError when the columns fit no kind.
    """
    names = set(column_names)
    if {CHOSEN, REJECTED} <= names:
        return "preferences"
    if names & {RESPONSE, RESPONSE_IDS}:
        return "trajectories"
    if MESSAGES in names:
        return "sft"
    if PROMPT in names:
        return "prompts"
    raise DataError(
        f"columns {_listed(sorted(names)) or '(none)'}: no prompts, trajectories, preferences or sft; "
        f"{suggest(PROMPT, names)}"
    )


def suggest(column: str, present: Iterable[str]) -> str:
    """What to do about a missing column: rename the nearest one present, or see what there is."""
    names = sorted(set(present))
    known = next((name for name in ALIASES.get(column, ()) if name in names), None)
    close = [known] if known else get_close_matches(column, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean `{shown(close[0])}`? rename it to `{column}`"
    return f"it has {_listed(names) or 'no columns'}"


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - NAMES_SHOWN} more"] if len(names) > NAMES_SHOWN else []
    return ", ".join([*(shown(name) or "(no name)" for name in names[:NAMES_SHOWN]), *more])


def missing(where: str, column: str, present: Iterable[str], do: str = "") -> DataError:
    """The error for a column that is not there: `where: no column X; did you mean Y?`"""
    return DataError(
        f"{where}: no column `{shown(column)}`; {suggest(column, present)}" + (f"; {do}" if do else "")
    )


def trajectory_row(row: Trajectory) -> dict[str, Any]:
    """A trajectory as a row of TRAJECTORIES; loading what is written gives the same trajectory back."""
    return {
        PROMPT: row.messages,
        RESPONSE: row.response,
        PROMPT_IDS: row.prompt_ids,
        RESPONSE_IDS: row.response_ids,
        RESPONSE_MASK: row.response_mask,
        BEHAVIOR_LOG_PROBS: row.behavior_log_probs,
        SCORE: row.score,
        TOKEN_LEVEL_SCORES: row.token_level_scores,
        FINISH_REASON: row.finish_reason or None,
        TEMPERATURE: row.temperature,
        TOP_P: row.top_p,
        BEHAVIOR_POLICY: row.behavior_policy or None,
        POLICY_VERSION: row.policy_version,
        GROUP: row.group,
        DATA_SOURCE: row.data_source,
        REWARD_MODEL: None if row.ground_truth is None else {"style": "rule", GROUND_TRUTH: row.ground_truth},
        EXTRA_INFO: dict(row.extra_info) or None,
    }
