"""What moves between the parts: rows read from files, the batch made from them, what the updates report.

B rows by T right-padded response positions. Masks are True where a token counts. Ids are int64 numpy arrays,
log-probs and scores float32, log-probs in nats at the row's temperature. Holds data only: no maths, no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Message = dict[str, Any]
Metrics = dict[str, float]


class TokenRow(Protocol):
    """What a model reads of a row: the prompt, then the response it is trained on or scored at."""

    @property
    def prompt_ids(self) -> Ids: ...
    @property
    def response_ids(self) -> Ids: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt to answer.

    Prompt(where="test.parquet row 3", messages=[{"role": "user", "content": "347+258="}],
           prompt_ids=[5, 6, 9, ...], ground_truth="605", data_source="addition", extra_info={})
    """

    where: str
    messages: list[Message] | str  # chat messages, or raw text that no template is put around
    prompt_ids: Ids
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last user turn, or the raw text."""
        return prompt_text(self.messages)


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One row to imitate: SFT trains on the response tokens whose mask is True."""

    where: str
    prompt_ids: Ids
    response_ids: Ids
    response_mask: Mask


@dataclass(frozen=True, slots=True)
class PreferencePair:
    """Two responses to one prompt; `chosen` is the better one."""

    where: str
    messages: list[Message] | str
    prompt_ids: Ids
    chosen_ids: Ids
    rejected_ids: Ids
    chosen: str = ""
    rejected: str = ""
    margin: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One stored prompt + response: one row.

    Trajectory(where="part-0.parquet row 7", prompt_ids=[5, 6, 9], response_ids=[3, 1],
               response_mask=[True, True], behavior_log_probs=[-0.1, -0.7], score=1.0, finish_reason="stop",
               temperature=1.0, group="347+258=", ...)
    """

    where: str
    messages: list[Message] | str
    prompt_ids: Ids  # [P]
    response_ids: Ids  # [T]
    response_mask: Mask  # [T]
    response: str = ""  # text, without stop tokens
    behavior_log_probs: Floats | None = None  # [T]; None: behavior unknown, never "ratio 1"
    score: float | None = None
    token_level_scores: Floats | None = None  # [T]; sums to `score` when both are given
    baseline_score: float | None = None  # what the prompt's greedy answer scored
    finish_reason: str = ""  # "stop", "length" or "" (not stored)
    temperature: float = 1.0
    top_p: float = 1.0
    group: str = ""  # the prompt this row answers; rows of one prompt share it
    behavior_policy: str = ""
    policy_version: int = 0
    ground_truth: Any = None
    data_source: str = ""
    extra_info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The last user turn, or the raw text, of the prompt."""
        return prompt_text(self.messages)

    @property
    def key(self) -> str:
        """Content hash of what a frozen model sees of this row: ids and temperature."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.prompt_ids, self.response_ids):
            digest.update(
                len(part).to_bytes(8, "little") + np.ascontiguousarray(part, dtype=np.int64).tobytes()
            )
        digest.update(repr(float(self.temperature)).encode())
        return digest.hexdigest()

    def with_score(self, score: float | None) -> Trajectory:
        """The same row, scored anew."""
        return replace(self, score=score, token_level_scores=None)


def prompt_text(messages: list[Message] | str) -> str:
    """The last user turn of chat messages; raw text as it is."""
    if isinstance(messages, str):
        return messages
    users = [str(m["content"]) for m in messages if m.get("role") == "user"]
    return users[-1] if users else ""


@dataclass(frozen=True, slots=True)
class Completion:
    """An engine's answer to one prompt: sampled ids with their log-probs at the sampling temperature."""

    response_ids: Ids
    log_probs: Floats
    finish_reason: str


@dataclass(slots=True)
class Experience:
    """A batch made ready for updates: stored rows with what the models say of them.

    All tensors are `[B, T]` but temperature.
    """

    rows: list[Trajectory]
    response_mask: Tensor
    temperature: Tensor  # [B]
    old_log_probs: Tensor  # the actor at the start of this batch's updates
    advantages: Tensor
    ref_log_probs: Tensor | None = None
    behavior_log_probs: Tensor | None = None
    rollout_is_weights: Tensor | None = None  # bounded old / behavior, detached
    loss_mask: Tensor | None = None  # what rejection leaves of response_mask; denominators keep the whole
    values: Tensor | None = None
    returns: Tensor | None = None
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Update:
    """One optimizer step's worth of rows of an Experience, for one role."""

    role: str  # "actor" or "critic"
    rows: tuple[int, ...]
    number: int  # its place in the batch's plan


class Action(StrEnum):
    """What a verdict asks for."""

    CONTINUE = "continue"
    SKIP = "skip"
    STOP_EPOCHS = "stop_epochs"
    ROLLBACK = "rollback"
    REFRESH = "refresh"
    PAUSE = "pause"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one guard says of some metrics, and why.

    Verdict(Action.ROLLBACK, "probe/kl_reference 0.31 is above 0.3", rule="kl_high",
            metric="probe/kl_reference", value=0.31, limit=0.3, remedies=(("lr", 0.3),))
    """

    action: Action = Action.CONTINUE
    reason: str = ""
    rule: str = ""
    metric: str = ""
    value: float = 0.0
    limit: float = 0.0
    remedies: tuple[tuple[str, Any], ...] = ()  # name, how much: remedies.py
    to_best: bool = False  # a rollback's target: the best by held-out score, else the last good state


@dataclass(frozen=True, slots=True)
class Softening:
    """What remedies have made of the recipe's settings; 1, 0 and None leave them as the recipe says."""

    lr: float = 1.0  # times the actor's
    critic_lr: float = 1.0
    kl_coef: float = 1.0  # times every KL that is on
    kl_coef_at: float | None = None  # instead of it
    entropy_coeff: float | None = None
    grad_clip: float | None = None  # at most, of both roles
    temperature: float | None = None  # of the next rollouts
    ppo_epochs: int = 0  # more of the actor's passes over a batch
    token_budget: float = 1.0  # times ppo_max_token_len_per_gpu
    reward_clip: tuple[float, float] | None = None
