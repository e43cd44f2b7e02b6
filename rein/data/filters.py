"""Small pure checks of a row that has its tokens: each passes, or raises BadRow with what is wrong.

Lengths are counted in tokens, after the chat template. Knows neither files nor tokenizers.
"""

from collections.abc import Collection

import numpy as np

from rein.data.rejects import LIMIT_KINDS, BadRow
from rein.types import Floats, Ids, Mask

LOG_PROB_TOLERANCE = 1e-4  # a log-prob of a rounded softmax can lie this far above 0
SUM_TOLERANCE = 1e-3


def within_limits(prompt_ids: Ids, response_ids: Ids | None, max_prompt: int, max_response: int) -> None:
    """Refuse an empty prompt, and a prompt or response over its limit."""
    if not len(prompt_ids):
        raise BadRow("no tokens", "the prompt has no tokens")
    if len(prompt_ids) > max_prompt:
        reason = f"the prompt has {len(prompt_ids)} tokens, data.max_prompt_length is {max_prompt}"
        raise BadRow(LIMIT_KINDS[0], reason)
    if response_ids is None:
        return
    if not len(response_ids):
        raise BadRow("no tokens", "the response has no tokens")
    if len(response_ids) > max_response:
        reason = f"the response has {len(response_ids)} tokens, data.max_response_length is {max_response}"
        raise BadRow(LIMIT_KINDS[1], reason)


def same_length(response_ids: Ids, values: Floats | Mask, name: str) -> None:
    """One value a response token."""
    if len(response_ids) != len(values):
        raise BadRow("lengths differ", f"{len(response_ids)} response_ids but {len(values)} {name}")


def counts_a_token(response_mask: Mask) -> None:
    """At least one token to learn from."""
    if not response_mask.any():
        raise BadRow("no tokens", "response_mask counts no token")


def usable_log_probs(log_probs: Floats, response_mask: Mask, name: str) -> Floats:
    """Finite and at most 0 where a token counts; elsewhere whatever is not finite becomes 0."""
    counted = np.where(response_mask, log_probs, 0.0)
    if (wrong := np.flatnonzero(~np.isfinite(counted))).size:
        raise BadRow("log-probs not finite", f"{name}[{wrong[0]}] is {counted[wrong[0]]:g}")
    if (wrong := np.flatnonzero(counted > LOG_PROB_TOLERANCE)).size:
        reason = f"{name}[{wrong[0]}] is {counted[wrong[0]]:g}, and a log-prob is never above 0"
        raise BadRow("log-probs above 0", reason)
    return np.where(np.isfinite(log_probs), log_probs, 0.0).astype(np.float32)


def finite_in_float32(value: float, name: str) -> None:
    """What the tensors of training can hold."""
    if not abs(value) <= float(np.finfo(np.float32).max):  # as a numpy number it would cast the value
        raise BadRow(f"{name} not finite", f"{name} is {value:g}")


def usable_score(score: float | None, token_level_scores: Floats | None, *, scored: bool) -> None:
    """Finite, there when it is needed, and the sum of its parts."""
    if token_level_scores is not None and not np.isfinite(token_level_scores).all():
        place = int(np.flatnonzero(~np.isfinite(token_level_scores))[0])
        raise BadRow("score not finite", f"token_level_scores[{place}] is {token_level_scores[place]:g}")
    if score is None:
        if scored:
            raise BadRow("no score", "score is null")
        return
    finite_in_float32(score, "score")
    if token_level_scores is not None:
        total = float(token_level_scores.sum(dtype=np.float64))
        if abs(total - score) > SUM_TOLERANCE * max(1.0, abs(score)):
            raise BadRow("scores disagree", f"token_level_scores sum to {total:g} but score is {score:g}")


def last_turn(response_mask: Mask) -> int:
    """Where the last of several assistant turns begins; 0 where there is one, all of which is its own."""
    begins = np.flatnonzero(response_mask & ~np.append(False, response_mask[:-1]))
    return int(begins[-1]) if len(begins) > 1 else 0


def on_turns(turn_scores: Floats, response_mask: Mask) -> Floats:
    """token_level_scores [T]: each turn's score on its last token; a turn is a run of tokens that count."""
    behind = np.append(response_mask[1:], False)
    ends = np.flatnonzero(response_mask & ~behind)
    if len(ends) != len(turn_scores):
        raise BadRow(
            "lengths differ", f"{len(turn_scores)} turn_scores but {len(ends)} assistant turns that count"
        )
    if (wrong := np.flatnonzero(~np.isfinite(turn_scores))).size:
        raise BadRow("score not finite", f"turn_scores[{wrong[0]}] is {turn_scores[wrong[0]]:g}")
    placed = np.zeros(len(response_mask), dtype=np.float32)
    placed[ends] = turn_scores
    return placed


def counted_tokens(response_ids: Ids, stop_ids: Collection[int], pad_id: int | None) -> Mask:
    """The mask of a stored response that came without one: all of it, less padding behind its end token.

    Read from positions, not from ids: the first end token counts even where the pad id is the same one, and
    an end token followed by anything but end tokens and padding is part of the response.
    """
    counted = np.ones(len(response_ids), dtype=np.bool_)
    ends = np.flatnonzero(np.isin(response_ids, list(stop_ids)))
    if ends.size:
        padding = list(stop_ids) if pad_id is None else [*stop_ids, pad_id]
        behind = response_ids[ends[0] + 1 :]
        counted[ends[0] + 1 :] = not np.isin(behind, padding).all()
    return counted
