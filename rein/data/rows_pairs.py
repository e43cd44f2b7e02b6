"""A stored preference in, a PreferencePair out, or its two responses as trajectories of unknown behavior.

Three layouts give the same tokens: prompt and two texts; prompt and two lists of messages; two whole
conversations that begin alike, where the prompt is what they share.
"""

from itertools import takewhile

import numpy as np

from rein.data import cells, filters, schemas
from rein.data.parquet import Row
from rein.data.rejects import BadRow, Reject
from rein.data.rows_prompts import Reading, answerable, context_of, fitted, group_of
from rein.data.rows_trajectories import response_turns
from rein.data.tokenize import ASSISTANT
from rein.types import Ids, Mask, Message, PreferencePair, Trajectory

Answer = list[Message]


def read_pair(where: str, row: Row, reading: Reading) -> PreferencePair:
    """A row of a preferences file."""
    reading = reading.of(row)
    prompt, chosen, rejected = _parts(row, reading)
    prompt_ids = fitted(reading.encoder.prompt_ids(prompt), reading)
    sides = []
    for name, answer in ((schemas.CHOSEN, chosen), (schemas.REJECTED, rejected)):
        ids, text, _ = _side(prompt, prompt_ids, answer, name, reading)
        sides.append((ids, text))
    if np.array_equal(sides[0][0], sides[1][0]):
        raise BadRow("chosen equals rejected", "chosen and rejected have the same tokens")
    margin = cells.number(row.get(schemas.MARGIN), schemas.MARGIN)
    if margin is not None:
        filters.finite_in_float32(margin, schemas.MARGIN)
    (chosen_ids, chosen_text), (rejected_ids, rejected_text) = sides
    return PreferencePair(
        where, prompt, prompt_ids, chosen_ids, rejected_ids, chosen_text, rejected_text, margin or 0.0
    )


def read_both(where: str, row: Row, reading: Reading, *, ranked: bool = False) -> list[Trajectory | Reject]:
    """Chosen and rejected as two trajectories; one that cannot be used leaves the other.

    Neither is scored, unless `ranked`: then 1 and 0, which says no more than which is better."""
    try:
        reading = reading.of(row)
        prompt, chosen, rejected = _parts(row, reading)
        prompt_ids = reading.encoder.prompt_ids(prompt)
        truth, source, extra = context_of(row)
        group = group_of(row, prompt, prompt_ids, reading)
        prompt_ids = fitted(prompt_ids, reading)
    except BadRow as bad:
        return [
            Reject(f"{where} {name}", bad.reason, bad.kind) for name in (schemas.CHOSEN, schemas.REJECTED)
        ]
    found: list[Trajectory | Reject] = []
    for name, answer in ((schemas.CHOSEN, chosen), (schemas.REJECTED, rejected)):
        try:
            ids, text, mask = _side(prompt, prompt_ids, answer, name, reading)
        except BadRow as bad:
            found.append(Reject(f"{where} {name}", bad.reason, bad.kind))
            continue
        found.append(
            Trajectory(
                where=f"{where} {name}",
                messages=prompt,
                prompt_ids=prompt_ids,
                response_ids=ids,
                response_mask=mask,
                response=text,
                score=float(name == schemas.CHOSEN) if ranked else None,
                finish_reason="stop",
                group=group,
                ground_truth=truth,
                data_source=source,
                extra_info=extra,
            )
        )
    unusable = next((item for item in found if isinstance(item, Reject)), None)
    if ranked and unusable is not None:  # one side alone says nothing of which is better
        said, kind = f"its pair cannot be used ({unusable.reason})", unusable.kind
        return [item if isinstance(item, Reject) else Reject(item.where, said, kind) for item in found]
    return found


def _parts(row: Row, reading: Reading) -> tuple[list[Message] | str, Answer, Answer]:
    """Prompt, chosen and rejected turns, whatever the layout."""
    chosen, rejected = _answer(row, schemas.CHOSEN), _answer(row, schemas.REJECTED)
    prompt: list[Message] | str
    if chosen[0]["role"] != ASSISTANT and rejected[0]["role"] != ASSISTANT:
        prompt, chosen, rejected = _shared(chosen, rejected)
    elif row.get(schemas.PROMPT) is None:
        raise BadRow("no prompt", "prompt is missing, and chosen and rejected do not hold it")
    else:
        prompt = cells.messages_or_text(row[schemas.PROMPT], schemas.PROMPT)
        if chosen[0]["role"] != rejected[0]["role"]:
            raise BadRow(
                "wrong type", "one of chosen and rejected begins with its prompt, the other does not"
            )
    if chosen == rejected:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same")
    return reading.encoder.normal(answerable(prompt)), chosen, rejected


def _answer(row: Row, name: str) -> Answer:
    if row.get(name) is None:
        raise BadRow("empty answer", f"{name} is missing")
    found = cells.messages_or_text(row[name], name)
    turns = [{"role": ASSISTANT, "content": found}] if isinstance(found, str) else found
    if turns[-1]["role"] != ASSISTANT:
        raise BadRow("answer ends in no answer", f"{name} ends in a {turns[-1]['role']} turn")
    if not str(turns[-1]["content"]).strip():
        raise BadRow("empty answer", f"{name} is empty")
    return turns


def _shared(chosen: Answer, rejected: Answer) -> tuple[list[Message], Answer, Answer]:
    """Two conversations cut where they part; the prompt ends before the first turn that differs."""
    alike = list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    size = min(len(alike), len(chosen) - 1, len(rejected) - 1)
    prompt = chosen[:size]
    if not prompt or chosen[size]["role"] != ASSISTANT or rejected[size]["role"] != ASSISTANT:
        raise BadRow("no prompt", "chosen and rejected share no prompt that an answer follows")
    return prompt, chosen[size:], rejected[size:]


def _side(
    prompt: list[Message] | str, prompt_ids: Ids, answer: Answer, name: str, reading: Reading
) -> tuple[Ids, str, Mask]:
    ids, text, mask = response_turns(prompt, answer, reading)
    data = reading.data
    try:
        filters.within_limits(prompt_ids, ids, data.max_prompt_length, data.max_response_length)
    except BadRow as bad:
        raise BadRow(bad.kind, f"{name}: {bad.reason}") from bad
    return ids, text, mask
