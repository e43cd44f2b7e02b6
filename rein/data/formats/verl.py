"""verl's files: prompts as its preprocessing writes them, rollout dumps, and generated responses.

`trainer.rollout_data_dir` and `trainer.validation_data_dir` hold <step>.jsonl with input, output, gts, score,
step and whatever the reward function returned beside the score. The input is the prompt as it was fed, put
through the chat template and decoded again; where its shape is that of ChatML it becomes messages.
"""

import re
from typing import Final

from rein.data import cells
from rein.data import schemas as s
from rein.data.formats.chat import text_only, text_or_turns
from rein.data.formats.layout import (
    Format,
    Layout,
    Source,
    absent,
    bare,
    has_any,
    is_text,
    is_turns,
    score_of,
    truth,
)
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.types import Message

RENDERED = (
    "the prompt is the text that the chat template had made, its special tokens gone; in chat mode a "
    "template would be put around it again, so set data.apply_chat_template=false"
)
UNRENDERED = "the rendered prompt became messages again"
ANSWERS: Final = ("answer", "solution")
_MARKED: Final = re.compile(r"<\|im_start\|>(system|user|assistant|tool)\n(.*?)<\|im_end\|>\n?", re.DOTALL)
_OPEN: Final = "<|im_start|>assistant\n"
_BARE: Final = re.compile(r"(?:system\n(?P<system>.*?)\n)?user\n(?P<user>.*)\nassistant\n?", re.DOTALL)
_BARE_TURN: Final = re.compile(r"^(?:system|user|assistant)$", re.MULTILINE)


def _has_prompt(row: Row) -> bool:
    prompt = row.get(s.PROMPT)
    return is_text(prompt) or is_turns(prompt)


def _is_prompts(row: Row) -> bool:
    return _has_prompt(row) and bare(row) and has_any(row, s.REWARD_MODEL, s.DATA_SOURCE)


def _is_dump(row: Row) -> bool:
    beside = ("step", "gts", "data_source", "uid", "acc")
    return (
        is_text(row.get("input"))
        and is_text(row.get("output"))
        and "score" in row
        and any(n in row for n in beside)
    )


def _generated(row: Row) -> bool:
    return _has_prompt(row) and isinstance(row.get("responses"), list | str)


def _context(source: Source) -> Row:
    """verl's columns beside the prompt, which are Rein's own."""
    names = (s.DATA_SOURCE, s.ABILITY, s.REWARD_MODEL, s.EXTRA_INFO)
    found = {name: source.take(name, name) for name in names}
    for name in (s.REWARD_MODEL, s.EXTRA_INFO):
        found[name] = cells.struct(found[name], name) or None
    return found


def _prompt(source: Source) -> list[Row]:
    text_only(source)
    row = {s.PROMPT: text_or_turns(source.take(s.PROMPT, s.PROMPT), s.PROMPT, source), **_context(source)}
    beside = row[s.EXTRA_INFO] or {}
    answer = next((beside[name] for name in ANSWERS if isinstance(beside.get(name), str)), None)
    return [row if answer is None else {**row, s.RESPONSE: answer}]


def _dumped(source: Source) -> list[Row]:
    prompt = cells.text(source.take(s.PROMPT, "input") or "", "input")
    response = source.take(s.RESPONSE, "output")
    if absent(response):
        raise BadRow("no response", "output is missing")
    score = score_of(source.take(s.SCORE, "score"), "score")
    step = source.peek("step")
    version = source.take(s.POLICY_VERSION, "step") if isinstance(step, int) else None
    source.leave(
        "a name drawn anew at every step; rows of one prompt are found by the prompt", "uid", "request_id"
    )
    return [
        {
            s.PROMPT: unrendered(prompt, source),
            s.RESPONSE: cells.text(response, "output"),
            s.SCORE: score,
            s.POLICY_VERSION: version,
            s.REWARD_MODEL: truth(source.take("reward_model.ground_truth", "gts")),
            s.DATA_SOURCE: source.take(s.DATA_SOURCE, s.DATA_SOURCE),
        }
    ]


def _responses(source: Source) -> list[Row]:
    """verl's generation entry point adds `responses`, one text a sample."""
    text_only(source)
    prompt = text_or_turns(source.take(s.PROMPT, s.PROMPT), s.PROMPT, source)
    common = {s.PROMPT: prompt, **_context(source)}
    found = source.take(s.RESPONSE, "responses")
    found = found if isinstance(found, list) else [] if absent(found) else [found]
    scores = source.take(s.SCORE, "scores", "score")
    scores = scores if isinstance(scores, list) else [scores] * len(found)
    if not found or len(scores) != len(found):
        raise BadRow("no answer", f"{len(found)} responses, {len(scores)} scores")
    return [
        {
            **common,
            s.RESPONSE: text_or_turns(text, "responses", source),
            s.SCORE: score_of(score, "score"),
        }
        for text, score in zip(found, scores, strict=True)
    ]


def unrendered(prompt: str, source: Source) -> list[Message] | str:
    """The messages that a ChatML template made this text of; the text itself where that cannot be told."""
    found = _marked(prompt) if _OPEN in prompt else _bare(prompt)
    source.note(RENDERED if found is None else UNRENDERED)
    return prompt if found is None else found


def _marked(prompt: str) -> list[Message] | None:
    body = prompt.removesuffix(_OPEN)
    turns = [{"role": m[1], "content": m[2]} for m in _MARKED.finditer(body)]
    whole = "".join(m[0] for m in _MARKED.finditer(body))
    return turns if turns and body != prompt and whole == body else None


def _bare(prompt: str) -> list[Message] | None:
    """One question, perhaps after a system text: of more turns it cannot be told where they part."""
    found = _BARE.fullmatch(prompt)
    if found is None or len(_BARE_TURN.findall(prompt)) != 2 + (found["system"] is not None):
        return None
    system = [] if found["system"] is None else [{"role": "system", "content": found["system"]}]
    return [*system, {"role": "user", "content": found["user"]}]


VERL: Final = Format(
    "verl: prompts with reward_model, rollout dumps (rollout_data_dir), generated responses",
    (
        Layout("generated responses", "trajectories", "prompt, responses", _generated, _responses),
        Layout("rollout dump", "trajectories", "input, output, score, step", _is_dump, _dumped),
        Layout("prompts", "prompts", "prompt, data_source, reward_model", _is_prompts, _prompt),
    ),
)
