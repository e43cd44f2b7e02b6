"""A stored row in, a Trajectory out: its tokens, what counts of them, who wrote them, what they scored.

Stored ids are used untouched; text alone is tokenised, and then log-probs stored beside it belong to no
token. A row without behavior log-probs has an unknown behavior policy, never a ratio of 1.
"""

import math

import numpy as np

from rein.data import cells, filters, schemas
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.data.rows_prompts import Reading, context_of, fitted, group_of, prompt_of
from rein.types import Floats, Ids, Mask, Message, Trajectory

# What engines and servers write for the two ways a response ends.
FINISHED = frozenset({"stop", "eos", "eos_token", "end_turn", "stop_sequence", "tool_calls", "function_call"})
CUT_OFF = frozenset({"length", "max_tokens", "max_length", "max_new_tokens"})

COLDEST, HOTTEST = 0.01, 100.0  # temperatures outside leave no log-prob that means anything

NO_TEMPERATURE = "temperature is not stored: 1.0 is assumed"
GREEDY = "temperature is 0: 1.0 is used and the stored log-probs are left out, behavior unknown"
LOOSE_LOG_PROBS = (
    "log-probs are stored without response_ids and belong to no token: left out, behavior unknown"
)
CUT_PROMPT = "the stored log-probs follow the whole prompt, which is cut: left out, behavior unknown"
NO_LOG_PROBS = "behavior_log_probs are not stored: behavior unknown"
CUT_SAMPLING = (
    "top_p is below 1: the stored log-probs may be of the cut distribution, not of the full softmax"
)
PADDED = "padding behind the end token is not counted"
ODD_FINISH = "finish_reason is neither stop nor length: no end token is added"


def read_trajectory(where: str, row: Row, reading: Reading, *, scored: bool) -> Trajectory:
    """A row of a trajectories file; with `scored`, one that has a score."""
    reading = reading.of(row)
    messages, whole = prompt_of(row, reading)
    prompt_ids = fitted(whole, reading)
    finish = _finish_reason(row, reading)
    ids, text, mask = _response(row, messages, finish, reading)
    filters.within_limits(prompt_ids, ids, reading.data.max_prompt_length, reading.data.max_response_length)
    filters.counts_a_token(mask)
    if not finish and int(ids[np.flatnonzero(mask)[-1]]) in reading.encoder.stop_ids:
        finish = "stop"
    score, token_level_scores = _scores(row, ids, mask, scored=scored)
    temperature, greedy = _temperature(row, reading)
    truth, source, extra = context_of(row)
    return Trajectory(
        where=where,
        messages=messages,
        prompt_ids=prompt_ids,
        response_ids=ids,
        response_mask=mask,
        response=text,
        behavior_log_probs=_behavior(
            row, ids, mask, reading, greedy=greedy, cut=len(prompt_ids) < len(whole)
        ),
        score=score,
        token_level_scores=token_level_scores,
        baseline_score=_baseline(row),
        finish_reason=finish,
        temperature=temperature,
        top_p=_top_p(row),
        group=group_of(row, messages, whole, reading),
        behavior_policy=cells.label(row.get(schemas.BEHAVIOR_POLICY), schemas.BEHAVIOR_POLICY),
        policy_version=_version(row),
        ground_truth=truth,
        data_source=source,
        extra_info=extra,
    )


def _response(
    row: Row, messages: list[Message] | str, finish: str, reading: Reading
) -> tuple[Ids, str, Mask]:
    """Ids, text of the last turn without its end token, and mask of the response."""
    encoder = reading.encoder
    stored = cells.ids(row.get(schemas.RESPONSE_IDS), schemas.RESPONSE_IDS, encoder.vocab_size)
    mask = cells.mask(row.get(schemas.RESPONSE_MASK), schemas.RESPONSE_MASK)
    if stored is not None:
        if mask is None:
            mask = filters.counted_tokens(stored, encoder.stop_ids, encoder.pad_id)
            reading.noticed[PADDED] += not mask.all()
        filters.same_length(stored, mask, schemas.RESPONSE_MASK)
        return stored, encoder.decode_response(stored[filters.last_turn(mask) :]), mask
    if mask is not None:
        raise BadRow("no response_ids", "response_mask needs response_ids to belong to")
    value = row.get(schemas.RESPONSE)
    if value is None:
        raise BadRow("no response", "response is missing")
    response = cells.messages_or_text(value, schemas.RESPONSE)
    if isinstance(response, list):
        return response_turns(messages, response, reading, finished=finish in ("", "stop"))
    if not response:
        raise BadRow("no tokens", "the response has no tokens")
    # An end token that was not written is added only to a response that is not known to be cut off.
    finished = finish in ("", "stop")
    kept = row.get(schemas.PROMPT_IDS) is not None  # then the template's own rendering need not fit them
    ids = encoder.apart(response, finished) if kept else encoder.response_ids(messages, response, finished)
    if len(ids) and int(ids[-1]) in encoder.stop_ids:
        response = _without_end(response, ids, reading)
    return ids, response, np.ones(len(ids), dtype=np.bool_)


def response_turns(
    prompt: list[Message] | str, turns: list[Message], reading: Reading, *, finished: bool = True
) -> tuple[Ids, str, Mask]:
    """The same of a response given as messages: only what the assistant said counts."""
    if turns[-1]["role"] != "assistant":
        raise BadRow(
            "answer ends in no answer", f"the last message is a {turns[-1]['role']} turn, not the assistant's"
        )
    text = str(turns[-1]["content"])
    if not any(str(turn["content"]) for turn in turns):
        raise BadRow("no tokens", "the response has no tokens")
    if len(turns) == 1:
        ids = reading.encoder.response_ids(prompt, text, finished)
        return ids, text, np.ones(len(ids), dtype=np.bool_)
    if isinstance(prompt, str):
        raise BadRow("no chat template", f"{len(turns)} messages in a response need a chat template")
    _, ids, mask = reading.encoder.conversation([*prompt, *turns], context=len(prompt))
    size = len(ids) if finished else len(ids) - 1  # conversation() ends in an end token
    return ids[:size], text, mask[:size]


def _without_end(response: str, ids: Ids, reading: Reading) -> str:
    """The text a rule scores: cut where the stored text itself holds an end token."""
    encoder = reading.encoder
    end = encoder.tokenizer.decode([int(ids[-1])])
    return response[: response.index(end)] if end and end in response else response


def _finish_reason(row: Row, reading: Reading) -> str:
    value = row.get(schemas.FINISH_REASON)
    if isinstance(value, dict):  # SGLang's {"type": "stop", "matched": 2}
        value = value.get("type")
    stored = cells.label(value, schemas.FINISH_REASON).lower()
    if stored in FINISHED:
        return "stop"
    if stored in CUT_OFF:
        return "length"
    reading.noticed[ODD_FINISH] += bool(stored)
    return stored


def _scores(row: Row, ids: Ids, mask: Mask, *, scored: bool) -> tuple[float | None, Floats | None]:
    score = cells.number(row.get(schemas.SCORE), schemas.SCORE)
    placed = cells.floats(row.get(schemas.TOKEN_LEVEL_SCORES), schemas.TOKEN_LEVEL_SCORES)
    turns = cells.floats(row.get(schemas.TURN_SCORES), schemas.TURN_SCORES)
    if turns is not None:
        if placed is not None:
            raise BadRow("scores disagree", "token_level_scores and turn_scores are both there; keep one")
        placed = filters.on_turns(turns, mask)
    elif placed is not None:
        if row.get(schemas.RESPONSE_IDS) is None:
            raise BadRow("no response_ids", "token_level_scores need response_ids to belong to")
        filters.same_length(ids, placed, schemas.TOKEN_LEVEL_SCORES)
    filters.usable_score(score, placed, scored=scored and placed is None)
    return float(placed.sum(dtype=np.float64)) if score is None and placed is not None else score, placed


def _baseline(row: Row) -> float | None:
    stored = cells.number(row.get(schemas.BASELINE_SCORE), schemas.BASELINE_SCORE)
    if stored is not None:
        filters.finite_in_float32(stored, schemas.BASELINE_SCORE)
    return stored


def _temperature(row: Row, reading: Reading) -> tuple[float, bool]:
    """The temperature to compute at, and whether the row was written greedily."""
    stored = cells.number(row.get(schemas.TEMPERATURE), schemas.TEMPERATURE)
    if stored is None:
        reading.noticed[NO_TEMPERATURE] += 1
        return 1.0, False
    if not (stored == 0 or COLDEST <= stored <= HOTTEST):
        raise BadRow("temperature", f"temperature is {stored:g}, not 0 or in [{COLDEST:g}, {HOTTEST:g}]")
    return (stored, False) if stored > 0 else (1.0, True)


def _top_p(row: Row) -> float:
    stored = cells.number(row.get(schemas.TOP_P), schemas.TOP_P)
    if stored is None:
        return 1.0
    if not 0 < stored <= 1:
        raise BadRow("top_p", f"top_p is {stored:g}, not in (0, 1]")
    return stored


def _version(row: Row) -> int:
    stored = cells.number(row.get(schemas.POLICY_VERSION), schemas.POLICY_VERSION)
    if stored is not None and stored != int(stored if math.isfinite(stored) else 0):
        raise BadRow("wrong type", f"policy_version is {stored:g}, not a whole number")
    return int(stored or 0)


def _behavior(row: Row, ids: Ids, mask: Mask, reading: Reading, *, greedy: bool, cut: bool) -> Floats | None:
    """The behavior policy's log-probs, or None where they are unknown or data.behavior says so."""
    name, asked = schemas.BEHAVIOR_LOG_PROBS, reading.data.behavior
    if asked == "recomputed" and greedy:
        raise BadRow("temperature", "temperature is 0, so no behavior log-probs can be recomputed")
    if asked in ("unknown", "recomputed"):
        return None
    stored = cells.floats(row.get(name), name)
    if stored is None:
        if asked == "stored":
            raise BadRow("no log-probs", f"{name} is null and data.behavior is stored")
        reading.noticed[NO_LOG_PROBS] += 1
        return None
    if row.get(schemas.RESPONSE_IDS) is None:
        if asked == "stored":
            raise BadRow("no response_ids", f"{name} needs response_ids to belong to")
        reading.noticed[LOOSE_LOG_PROBS] += 1
        return None
    filters.same_length(ids, stored, name)
    if greedy or cut:
        reading.noticed[GREEDY if greedy else CUT_PROMPT] += 1
        return None
    reading.noticed[CUT_SAMPLING] += _top_p(row) < 1
    return filters.usable_log_probs(stored, mask, name)
