"""OpenAI's API as files: requests with their responses, batch files, fine-tuning messages and pairs.

A response alone does not hold its prompt: it is looked for beside it, under `request`, or, for a batch output
file, in the batch input file given with it, by custom_id. Compatible servers (vLLM) add token ids; without
ids log-probs cannot be used, since they belong to token texts.
"""

from collections.abc import Mapping
from typing import Any, Final

from rein.data import schemas as s
from rein.data.formats.chat import answer_text, parsed, text_only, turns
from rein.data.formats.layout import (
    Format,
    Layout,
    Source,
    bare,
    first_of,
    has_any,
    is_turns,
    score_of,
    truth,
    whole_numbers,
)
from rein.data.formats.log_probs import behavior, chosen, temperature_of, token_id
from rein.data.formats.openai_requests import (
    BOOKKEEPING,
    ENVELOPE,
    RESPONSES,
    body_of,
    is_request,
    prompt_of,
    request_of,
    response_of,
    tools_in,
)
from rein.data.formats.preferences import read_pair
from rein.data.parquet import Row
from rein.data.rejects import BadRow
from rein.types import Message

SCORES: Final = ("score", "scores", "reward", "rewards")
TRUTHS: Final = ("ground_truth", "label", "answer", "gts")


def _choices(row: Row) -> Any:
    return first_of(row, "choices") or body_of(first_of(row, *RESPONSES)).get("choices")


def _is_answered(row: Row) -> bool:
    found = _choices(row)
    return isinstance(found, list) and any(
        isinstance(c, dict) and ("message" in c or "text" in c) for c in found
    )


def _is_batch_output(row: Row) -> bool:
    return "custom_id" in row and "response" in row and not is_request(row) and "request" not in row


def _is_batch_input(row: Row) -> bool:
    return "custom_id" in row and isinstance(row.get("body"), dict | str) and is_request(row)


def _answered(source: Source) -> list[Row]:
    """One trajectory for each choice of a response."""
    body, request = response_of(source), request_of(source)
    prompt, prompt_ids = prompt_of(request, source)
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadRow("no answer", "the response has no choices")
    judged = (*SCORES, "label") if isinstance(source.peek("label"), bool) else SCORES
    score_name = next((name for name in judged if source.peek(name) is not None), "")
    score = source.take(s.SCORE, score_name) if score_name else None
    if isinstance(score, list) and len(score) != len(choices):
        raise BadRow("no score", f"{len(choices)} choices but {len(score)} in {score_name}")
    model = first_of(body, "model") or first_of(request, "model") or source.take(s.BEHAVIOR_POLICY, "model")
    source.leave("read from the response or the request", "model")
    common = {
        s.PROMPT: prompt,
        s.TOOLS: tools_in(request),
        s.BEHAVIOR_POLICY: model if isinstance(model, str) else None,
        s.REWARD_MODEL: truth(source.take("reward_model.ground_truth", *TRUTHS)),
        s.TEMPERATURE: temperature_of(source, request),
        s.TOP_P: request.get("top_p"),
    }
    rows = []
    for i, choice in enumerate(choices):
        if not isinstance(choice, dict):
            raise BadRow("no answer", f"choices[{i}] is no struct")
        own = score[i] if isinstance(score, list) else score
        own = first_of(choice, "score", "reward") if own is None else own
        before = first_of(choice, "prompt_token_ids") or first_of(body, "prompt_token_ids") or prompt_ids
        rows.append(
            {
                **common,
                s.PROMPT_IDS: before,
                **_choice(choice, request, source),
                s.SCORE: score_of(own, "score"),
            }
        )
    return rows


def _choice(choice: Mapping[str, Any], request: dict[str, Any], source: Source) -> Row:
    message = choice.get("message")
    response: str | list[Message]
    if isinstance(message, dict):
        (turn,) = turns({"role": "assistant", **message}, "message", source)
        response = answer_text(turn)
    else:
        said = choice.get("text")
        response = said if isinstance(said, str) else ""
    log_probs, found = _log_probs(choice.get("logprobs"))
    ids = whole_numbers(first_of(dict(choice), "token_ids", "output_token_ids"), "token_ids") or found
    if request.get("echo"):
        response, cut = _without_echo(str(response), request, choice)
        log_probs = None if log_probs is None else log_probs[cut:]
        ids = ids[cut:] if ids is found and ids is not None else ids
    row: Row = {s.RESPONSE: response, s.FINISH_REASON: choice.get("finish_reason"), s.RESPONSE_IDS: ids}
    return {**row, s.BEHAVIOR_LOG_PROBS: behavior(source, ids, log_probs, request)}


def _log_probs(value: Any) -> tuple[list[float | None] | None, list[int] | None]:
    """Log-probs and, where the tokens' texts name them, ids; of completions and of chat."""
    value = parsed(value) if isinstance(value, str) else value
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        entries = [entry if isinstance(entry, dict) else {} for entry in value["content"]]
        tokens = [str(entry.get("token")) for entry in entries]
        numbers = [chosen(entry.get("logprob"), None) for entry in entries]
    elif isinstance(value, dict) and isinstance(value.get("token_logprobs"), list):
        numbers = [chosen(number, None) for number in value["token_logprobs"]]
        tokens = [str(token) for token in value.get("tokens") or [""] * len(numbers)]
    else:
        return None, None
    if not numbers:
        return None, None
    ids = [found for token in tokens if (found := token_id(token)) is not None]
    return numbers, ids if len(ids) == len(tokens) else None


def _without_echo(text: str, request: Mapping[str, Any], choice: Mapping[str, Any]) -> tuple[str, int]:
    """The answer behind an echoed prompt, and how many tokens the prompt had."""
    prompt = request.get("prompt")
    if not isinstance(prompt, str) or not text.startswith(prompt):
        raise BadRow("echoed prompt", "the response echoes a prompt that it does not begin with")
    held = choice.get("logprobs")
    offsets = held.get("text_offset") if isinstance(held, dict) else None
    return text[len(prompt) :], sum(offset < len(prompt) for offset in offsets or [])


def _asked(source: Source) -> list[Row]:
    """A request without a response: a prompt."""
    body = body_of(source.take(s.PROMPT, "body"))
    prompt, _ = prompt_of(body, source)
    if prompt is None:
        raise BadRow("no prompt", "the request's prompt is token ids, and a prompts file holds text")
    source.leave(BOOKKEEPING, *ENVELOPE)
    return [{s.PROMPT: prompt, s.TOOLS: tools_in(body)}]


def _pair(source: Source) -> list[Row]:
    """Preference fine-tuning: input.messages, preferred_output, non_preferred_output."""
    asked = body_of(source.take(s.PROMPT, "input"))
    prompt = turns(asked.get("messages"), "input.messages", source)
    one = source.take(s.CHOSEN, "preferred_output")
    other = source.take(s.REJECTED, "non_preferred_output")
    return [{**read_pair(source, prompt, one, other), s.TOOLS: tools_in(asked)}]


def _fine_tuning(source: Source) -> list[Row]:
    """Messages; where weights leave only the last answer to be trained, a prompt and that answer."""
    text_only(source)
    value = source.take(s.MESSAGES, "messages")
    messages = turns(value, "messages", source)
    source.leave("how many calls a turn may hold, which is no matter of training", "parallel_tool_calls")
    answers = [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    idle = [i for i in answers if isinstance(value, list) and value[i].get("weight") == 0]
    if not idle:
        return [{s.MESSAGES: messages}]
    if answers[-1] in idle or len(idle) != len(answers) - 1:
        raise BadRow(
            "turns of weight 0",
            "answers of weight 0 stand among trained ones, and Rein trains all or the last",
        )
    last = answers[-1]
    source.note("answers of weight 0 are part of the prompt, the last is the response")
    return [{s.PROMPT: messages[:last], s.RESPONSE: answer_text(messages[last])}]


OPENAI: Final = Format(
    "OpenAI and compatible servers: requests with responses, batch files, fine-tuning messages and pairs",
    (
        Layout(
            "preference fine-tuning",
            "preferences",
            "input.messages, preferred_output, non_preferred_output",
            lambda row: "preferred_output" in row and "non_preferred_output" in row,
            _pair,
        ),
        Layout(
            "requests with responses",
            "trajectories",
            "choices or response, with messages, prompt or request",
            lambda row: _is_answered(row) and not _is_batch_output(row),
            _answered,
        ),
        Layout(
            "batch output", "trajectories", "custom_id, response.body.choices", _is_batch_output, _answered
        ),
        Layout("batch input", "prompts", "custom_id, body", _is_batch_input, _asked),
        Layout(
            "fine-tuning messages",
            "sft",
            "messages",
            lambda row: (
                is_turns(row.get("messages"))
                and bare(row)
                and not has_any(row, "label", "kto_tag", "chosen_messages")
            ),
            _fine_tuning,
        ),
    ),
)
