"""vLLM's outputs as files: RequestOutput with its outputs, or one output a row.

`logprobs` of an output is a list with one entry a token, and an entry comes as a map from ids to log-probs or
to {logprob, rank, decoded_token}, as a list of those, or as a number; `cumulative_logprob` must be their sum.
"""

from collections.abc import Mapping
from typing import Any, Final

from rein.data import schemas as s
from rein.data.formats.chat import parsed, text_or_turns
from rein.data.formats.layout import (
    Format,
    Layout,
    Source,
    absent,
    first_of,
    is_number,
    is_text,
    score_of,
    truth,
    whole_numbers,
)
from rein.data.formats.log_probs import LEFT, behavior, chosen, temperature_of
from rein.data.parquet import Row
from rein.data.rejects import BadRow

TEXTS: Final = ("text", "generated_text", "output_text", "response", "completion")
IDS: Final = ("token_ids", "output_token_ids", "generated_tokens", "completion_ids", "response_ids")
LOG_PROBS: Final = ("logprobs", "log_probs", "output_logprobs")
PROMPTS: Final = ("messages", "prompt")
SAMPLING: Final = ("sampling_params", "params")
SCORES: Final = ("score", "reward")
TRUTHS: Final = ("ground_truth", "label", "answer")
BOOKKEEPING = "the engine's bookkeeping"
ENGINE: Final = (
    "request_id",
    "finished",
    "metrics",
    "encoder_prompt",
    "encoder_prompt_token_ids",
    "lora_request",
    "num_cached_tokens",
    "multi_modal_placeholders",
    "kv_transfer_params",
)


def _outputs(row: Row) -> list[Any]:
    found = row.get("outputs")
    found = parsed(found) if isinstance(found, str) else found
    return found if isinstance(found, list) else []


def _is_request_output(row: Row) -> bool:
    found = _outputs(row)
    return (
        bool(found) and isinstance(found[0], dict) and any(name in found[0] for name in ("token_ids", "text"))
    )


def _is_flat(row: Row) -> bool:
    return isinstance(row.get("prompt_token_ids"), list) and any(name in row for name in (*IDS, *TEXTS))


def _request_output(source: Source) -> list[Row]:
    source.take(s.RESPONSE, "outputs")
    outputs = _outputs(source.row)
    if not outputs or not all(isinstance(output, dict) for output in outputs):
        raise BadRow("no answer", "outputs holds no output")
    if source.row.get("finished") is False:
        raise BadRow("unfinished", "the request was not finished")
    scores = source.take(s.SCORE, *SCORES, "scores", "rewards")
    if isinstance(scores, list) and len(scores) != len(outputs):
        raise BadRow("no score", f"{len(outputs)} outputs but {len(scores)} scores")
    common, sampling = _asked(source)
    rows = []
    for i, output in enumerate(outputs):
        score = scores[i] if isinstance(scores, list) else scores
        score = first_of(output, *SCORES) if score is None else score
        rows.append({**common, **_answer(source, output, sampling), s.SCORE: score_of(score, "score")})
    return rows


def _flat(source: Source) -> list[Row]:
    output = {
        "text": source.take(s.RESPONSE, *TEXTS),
        "token_ids": source.take(s.RESPONSE_IDS, *IDS),
        "logprobs": source.take(s.BEHAVIOR_LOG_PROBS, *LOG_PROBS),
        "cumulative_logprob": source.peek("cumulative_logprob"),
        "finish_reason": source.take(s.FINISH_REASON, "finish_reason"),
    }
    source.leave("read to check the log-probs", "cumulative_logprob")
    common, sampling = _asked(source)
    score = score_of(source.take(s.SCORE, *SCORES), "score")
    return [{**common, **_answer(source, output, sampling), s.SCORE: score}]


def _asked(source: Source) -> tuple[Row, dict[str, Any]]:
    """What all answers to one prompt share, and how they were sampled."""
    value = source.take(s.PROMPT, *PROMPTS)
    held = source.take("temperature, top_p", *SAMPLING)
    held = parsed(held) if isinstance(held, str) else held
    sampling = dict(held) if isinstance(held, Mapping) else {}
    for name in ("temperature", "top_p"):
        if name not in sampling and (own := source.take(name, name)) is not None:
            sampling[name] = own
    for name in (
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ):
        if name not in sampling and source.peek(name) is not None:
            sampling[name] = source.peek(name)
            source.leave("read for whether the log-probs can be used", name)
    source.leave(BOOKKEEPING, *ENGINE)
    source.leave("log-probs of the prompt are not trained on", "prompt_logprobs")
    common = {
        s.PROMPT: None if value is None else text_or_turns(value, s.PROMPT, source),
        s.PROMPT_IDS: source.take(s.PROMPT_IDS, "prompt_token_ids", "prompt_ids"),
        s.TEMPERATURE: temperature_of(source, sampling),
        s.TOP_P: sampling.get("top_p"),
        s.BEHAVIOR_POLICY: source.take(s.BEHAVIOR_POLICY, "model", "model_name"),
        s.REWARD_MODEL: truth(source.take("reward_model.ground_truth", *TRUTHS)),
    }
    return common, sampling


def _answer(source: Source, output: Mapping[str, Any], sampling: Mapping[str, Any]) -> Row:
    text, ids = output.get("text"), output.get("token_ids")
    if text is not None and not is_text(text):
        raise BadRow("wrong type", f"the output's text is a {type(text).__name__}")
    ids = whole_numbers(ids, "the output's token_ids")
    finish = output.get("finish_reason")
    if finish == "abort":
        raise BadRow("unfinished", "the request was aborted")
    return {
        s.RESPONSE: text,
        s.RESPONSE_IDS: ids,
        s.FINISH_REASON: finish,
        s.BEHAVIOR_LOG_PROBS: _log_probs(source, output, ids, sampling),
    }


def _log_probs(
    source: Source, output: Mapping[str, Any], ids: list[int] | None, sampling: Mapping[str, Any]
) -> list[float] | None:
    entries, cumulative = output.get("logprobs"), output.get("cumulative_logprob")
    entries = parsed(entries) if isinstance(entries, str) else entries
    if not isinstance(entries, list) or absent(entries):
        if is_number(cumulative):
            source.note(LEFT + "cumulative_logprob is one number for the whole answer, not one a token")
        return None
    if ids is None:
        return behavior(source, None, [None], sampling)
    numbers = [chosen(entry, ids[i] if i < len(ids) else None) for i, entry in enumerate(entries)]
    return behavior(source, ids, numbers, sampling, cumulative)


VLLM: Final = Format(
    "vLLM: RequestOutput with its outputs, or one output a row",
    (
        Layout(
            "RequestOutput",
            "trajectories",
            "prompt, prompt_token_ids, outputs",
            _is_request_output,
            _request_output,
        ),
        Layout(
            "one output a row",
            "trajectories",
            "prompt_token_ids, token_ids or text, logprobs",
            _is_flat,
            _flat,
        ),
    ),
)
