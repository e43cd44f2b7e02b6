"""A stored row in, a Demonstration out: chat messages, or a prompt and a response under the recipe's keys."""

import numpy as np

from rein.data import cells, filters, schemas
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.data.rows_prompts import Reading, answerable, fitted, prompt_of
from rein.types import Demonstration, Ids, Mask


def read_demonstration(
    where: str, row: Row, reading: Reading, *, prompt_key: str, response_key: str
) -> Demonstration:
    """The tokens to imitate: `response_key` after `prompt_key` (dots reach into structs), else `messages`."""
    reading = reading.of(row)
    if response_key == schemas.RESPONSE and row.get(schemas.RESPONSE_IDS) is not None:
        prompt_ids, ids, mask = _stored(row, reading)
    elif row.get(response_key.partition(".")[0]) is None and row.get(schemas.MESSAGES) is not None:
        prompt_ids, ids, mask = _chat(row, reading)
    else:
        prompt_ids, ids, mask = _two_texts(row, reading, prompt_key, response_key)
    prompt_ids = fitted(prompt_ids, reading)
    filters.within_limits(prompt_ids, ids, reading.data.max_prompt_length, reading.data.max_response_length)
    filters.counts_a_token(mask)
    return Demonstration(where, prompt_ids, ids, mask)


def _chat(row: Row, reading: Reading) -> tuple[Ids, Ids, Mask]:
    messages = cells.messages_or_text(row[schemas.MESSAGES], schemas.MESSAGES)
    if isinstance(messages, str):
        raise BadRow("wrong type", "messages is text, not a list of messages")
    return reading.encoder.conversation(messages)


def _two_texts(row: Row, reading: Reading, prompt_key: str, response_key: str) -> tuple[Ids, Ids, Mask]:
    prompt, response = cells.at(row, prompt_key), cells.at(row, response_key)
    for name, value in ((prompt_key, prompt), (response_key, response)):
        if value is None:
            raise BadRow("missing value", f"{name} is missing")
    messages = reading.encoder.normal(answerable(cells.messages_or_text(prompt, prompt_key)))
    answer = cells.messages_or_text(response, response_key)
    if isinstance(answer, list):
        if len(answer) > 1 or answer[0]["role"] != "assistant":
            raise BadRow("wrong type", f"{response_key} holds {len(answer)} messages, not one assistant turn")
        answer = str(answer[0]["content"])
    if not answer:
        raise BadRow("no tokens", "the response has no tokens")
    ids = reading.encoder.response_ids(messages, answer, True)
    return reading.encoder.prompt_ids(messages), ids, np.ones(len(ids), dtype=np.bool_)


def _stored(row: Row, reading: Reading) -> tuple[Ids, Ids, Mask]:
    encoder = reading.encoder
    ids = cells.ids(row[schemas.RESPONSE_IDS], schemas.RESPONSE_IDS, encoder.vocab_size)
    assert ids is not None
    mask = cells.mask(row.get(schemas.RESPONSE_MASK), schemas.RESPONSE_MASK)
    if mask is None:
        mask = filters.counted_tokens(ids, encoder.stop_ids, encoder.pad_id)
    filters.same_length(ids, mask, schemas.RESPONSE_MASK)
    return prompt_of(row, reading)[1], ids, mask
