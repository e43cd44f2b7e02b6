"""A stored row in, its prompt out; and what every reader of rows is handed.

Knows the prompt columns; a reader raises BadRow for a row that cannot be used.
"""

from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from rein.config.recipe import Data
from rein.data import cells, filters, schemas
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.data.split import prompt_key
from rein.data.tokenize import ASSISTANT, Encoder
from rein.types import Ids, Message, Prompt

GROUP_TEXT = 200  # a longer prompt is named by its hash
UNSHOWN = "tools are stored, and no chat template shows them to the model"


@dataclass(slots=True)
class Reading:
    """What a reader of rows needs: the encoder and the recipe's limits; and what it noticed."""

    encoder: Encoder
    data: Data
    noticed: Counter[str] = field(default_factory=Counter)  # what happened -> rows

    def of(self, row: Row) -> "Reading":
        """The same for this row: where it has tools, the chat template is told of them."""
        tools = cells.tools(row.get(schemas.TOOLS), schemas.TOOLS)
        if tools is None:
            return self
        encoder = copy(self.encoder)
        encoder.tools = tools
        self.noticed[UNSHOWN] += not (encoder.chat and "tools" in str(encoder.tokenizer.chat_template))
        return replace(self, encoder=encoder)


def read_prompt(where: str, row: Row, reading: Reading) -> Prompt:
    """A row of a prompts file."""
    reading = reading.of(row)
    messages, prompt_ids = prompt_of(row, reading)
    prompt_ids = fitted(prompt_ids, reading)
    filters.within_limits(prompt_ids, None, reading.data.max_prompt_length, reading.data.max_response_length)
    truth, source, extra = context_of(row)
    return Prompt(where, messages, prompt_ids, truth, source, extra)


def prompt_of(row: Row, reading: Reading) -> tuple[list[Message] | str, Ids]:
    """The prompt as it is fed, and its ids: stored ones untouched, else encoded."""
    encoder = reading.encoder
    stored = cells.ids(row.get(schemas.PROMPT_IDS), schemas.PROMPT_IDS, encoder.vocab_size)
    value = row.get(schemas.PROMPT)
    if value is None:
        if stored is None:
            raise BadRow("no prompt", "prompt is missing")
        return encoder.decode_prompt(stored), stored
    messages = encoder.normal(answerable(cells.messages_or_text(value, schemas.PROMPT)))
    return messages, encoder.prompt_ids(messages) if stored is None else stored


def fitted(prompt_ids: Ids, reading: Reading) -> Ids:
    """The prompt's ids within data.max_prompt_length, where data.truncation names the side to cut."""
    size, side = reading.data.max_prompt_length, reading.data.truncation
    if len(prompt_ids) <= size or side not in ("left", "right"):
        return prompt_ids
    reading.noticed[f"the prompt is cut on the {side} to data.max_prompt_length {size}"] += 1
    return reading.encoder.cut(prompt_ids, size, side)


def answerable(prompt: list[Message] | str) -> list[Message] | str:
    """The prompt itself; refused where it holds its own answer, or nothing."""
    if isinstance(prompt, list) and prompt[-1]["role"] == ASSISTANT:
        raise BadRow("prompt ends in an answer", "the prompt's last message is an assistant turn")
    return prompt


def context_of(row: Row) -> tuple[Any, str, dict[str, Any]]:
    """Ground truth (in verl's reward_model, or a column of its own), data source and extra information."""
    judged = cells.struct(row.get(schemas.REWARD_MODEL), schemas.REWARD_MODEL)
    truth = judged.get(schemas.GROUND_TRUTH, row.get(schemas.GROUND_TRUTH))
    source = cells.label(row.get(schemas.DATA_SOURCE), schemas.DATA_SOURCE)
    return truth, source, cells.struct(row.get(schemas.EXTRA_INFO), schemas.EXTRA_INFO)


def group_of(row: Row, messages: list[Message] | str, prompt_ids: Ids, reading: Reading) -> str:
    """What rows of one prompt share: the stored group, else the text of a single turn, else a hash of ids.

    Beside tools the text alone is not the prompt.
    """
    stored = cells.label(row.get(schemas.GROUP), schemas.GROUP)
    if stored:
        return stored
    plain = (
        messages if isinstance(messages, str) else str(messages[0]["content"]) if len(messages) == 1 else ""
    )
    alone = 0 < len(plain) <= GROUP_TEXT and reading.encoder.tools is None
    return plain if alone else prompt_key(prompt_ids)
