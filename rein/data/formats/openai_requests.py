"""What was asked of a server of OpenAI's API, and what it answered, wherever a file keeps the two.

The request stands beside the response, under a name such as `request`, or in the input file of a batch.
"""

from collections.abc import Mapping
from typing import Any, Final

from rein.data import schemas as s
from rein.data.formats.chat import TOOLS, parsed, tools_text, turns
from rein.data.formats.layout import Source, first_of, is_text, is_turns
from rein.data.rejects import BadRow
from rein.types import Message

REQUESTS: Final = ("request", "request_body", "kwargs", "params")
RESPONSES: Final = ("response", "completion", "response_body", "output")
ENVELOPE: Final = (
    *("id", "object", "created", "system_fingerprint", "service_tier", "usage", "prompt_logprobs"),
    *("kv_transfer_params", "method", "url", "error"),
)
SETTINGS: Final = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "n"),
    *("logprobs", "top_logprobs", "max_tokens", "max_completion_tokens", "stream", "echo", "stop", "seed"),
)
BOOKKEEPING = "the server's bookkeeping"


def body_of(value: Any) -> dict[str, Any]:
    """A request or response without the envelope of a batch or its JSON text."""
    value = parsed(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        return {}
    inner = value.get("body")
    inner = parsed(inner) if isinstance(inner, str) else inner
    return inner if isinstance(inner, dict) else value


def is_request(value: Any) -> bool:
    body = body_of(value)
    return (
        is_turns(body.get("messages")) or is_text(body.get("prompt")) or isinstance(body.get("prompt"), list)
    )


def response_of(source: Source) -> dict[str, Any]:
    """The response's body; raises BadRow for one that reports an error."""
    if source.peek("choices") is not None:
        source.take(s.RESPONSE, "choices")
        source.leave(BOOKKEEPING, *ENVELOPE, "prompt_token_ids")
        return source.row
    value = source.take(s.RESPONSE, *RESPONSES)
    held = parsed(value) if isinstance(value, str) else value
    status = held.get("status_code") if isinstance(held, dict) else None
    if isinstance(status, int) and status != 200:
        raise BadRow("failed request", f"the request failed with status {status}")
    if error := first_of(source.row, "error") or body_of(value).get("error"):
        raise BadRow("failed request", f"the request failed: {str(error)[:100]}")
    source.leave(BOOKKEEPING, *ENVELOPE)
    return body_of(value)


def request_of(source: Source) -> dict[str, Any]:
    """What was asked: beside the response, under `request`, or in the batch's input file."""
    found = source.take(s.PROMPT, *REQUESTS)
    if found is not None:
        return body_of(found)
    if is_request(
        {name: source.row.get(name) for name in ("messages", "prompt", "body") if name in source.row}
    ):
        whole = {**source.row, **body_of(source.row)}
        source.take(s.PROMPT, "messages", "prompt", "body")
        source.take(s.PROMPT, "prompt")
        source.take(s.TEMPERATURE, "temperature")
        source.take(s.TOP_P, "top_p")
        source.leave("settings of the request, read for whether its log-probs can be used", *SETTINGS)
        return whole
    key = source.take("the request it is joined to", "custom_id")
    held = source.ledger.requests.get(str(key)) if key is not None else None
    if held is None:
        do = (
            f"no request with custom_id {key!r}; give the batch's input file too"
            if key
            else "no request beside it"
        )
        raise BadRow("no prompt", f"the response does not hold its prompt, and there is {do}")
    return body_of(held)


def tools_in(request: Mapping[str, Any]) -> str | None:
    """The tools that a request describes."""
    return tools_text(first_of(dict(request), *TOOLS))


def prompt_of(
    request: Mapping[str, Any], source: Source
) -> tuple[list[Message] | str | None, list[int] | None]:
    """Messages, text, or the ids of a prompt."""
    if is_turns(request.get("messages")):
        return turns(request["messages"], "messages", source), None
    value = request.get("prompt")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        return value, None
    if isinstance(value, list) and value and all(isinstance(item, int) for item in value):
        return None, value
    raise BadRow("no prompt", "the request holds neither messages nor one prompt")
