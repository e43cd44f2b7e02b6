"""Stored log-probs of sampled tokens in, those that may serve as behavior log-probs out; or why not.

Rein reads behavior log-probs as of the full softmax at the row's temperature, one for each response id. An
engine's log-probs are that where it sampled at temperature 1 without cutting or bending the distribution. At
another temperature they are of the untempered softmax in one mode of the engine (vLLM's default) and of the
tempered one in another, and nothing in the row says which: `--log-probs` does.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rein.data.filters import LOG_PROB_TOLERANCE
from rein.data.formats.layout import Source, absent, first_of, is_number

CLAMPED: Final = -9998.0  # engines write -9999 where a log-prob is minus infinity
SUM_TOLERANCE: Final = 1e-2
TOKEN_ID: Final = re.compile(r"(?:<)?token_id:(\d+)>?")
ASSUMED: Final = "log-probs kept though no temperature is stored: 1 is assumed; --temperature says another"
BEYOND: Final = "some are not finite or above 0"
LEFT: Final = "log-probs left out, behavior unknown: "
NAMELESS: Final = (
    LEFT + "the tokens are named by their texts, not by ids, so that they belong to no token that can be "
    "trained; ask the server for return_token_ids or return_tokens_as_token_ids"
)
_NEUTRAL: Final[dict[str, tuple[float, ...]]] = {  # what leaves the distribution whole
    "top_p": (1.0,),
    "top_k": (0.0, -1.0),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
}


def temperature_of(source: Source, sampling: Mapping[str, Any]) -> float | None:
    """The temperature of a request; what the command line says where it has none."""
    found = _number(sampling.get("temperature"))
    return found if found is not None else source.ledger.options.temperature


def behavior(
    source: Source,
    ids: Sequence[int] | None,
    log_probs: Sequence[float | None] | None,
    sampling: Mapping[str, Any],
    cumulative: Any = None,
) -> list[float] | None:
    """The log-probs, or None, with the reason noted."""
    if log_probs is None:
        return None
    why = _unusable(source, ids, log_probs, sampling, cumulative)
    if why is None:
        if temperature_of(source, sampling) is None:
            source.note(ASSUMED)
        return [float(value) for value in log_probs if value is not None]
    source.note(why if why == NAMELESS else LEFT + why)
    return None


def chosen(entry: Any, token: int | None) -> float | None:
    """The sampled token's log-prob in one position of an engine's list; None where it is not there.

    An entry is a number, a map from ids to numbers or to {logprob, ...}, a pair (id, number), or a list of
    {token_id, logprob}.
    """
    if is_number(entry):
        return float(entry)
    if isinstance(entry, Mapping):
        if "logprob" in entry and not isinstance(entry["logprob"], Mapping):
            own = first_of(dict(entry), "token_id", "id")
            return _number(entry["logprob"]) if own is None or own == token else None
        found = next((entry[key] for key in (token, str(token), f"token_id:{token}") if key in entry), None)
        return _number(found.get("logprob") if isinstance(found, Mapping) else found)
    if isinstance(entry, list | tuple) and entry:
        if len(entry) >= 2 and is_number(entry[0]) and isinstance(entry[1], Mapping | int | float):
            return chosen({str(entry[0]): entry[1]}, token)
        return next((value for item in entry if (value := _of_item(item, token)) is not None), None)
    return None


def token_id(text: Any) -> int | None:
    """The id that a token's text names in the form `token_id:123`."""
    found = TOKEN_ID.fullmatch(text) if isinstance(text, str) else None
    return int(found[1]) if found else None


def _of_item(item: Any, token: int | None) -> float | None:
    if isinstance(item, Mapping) and first_of(dict(item), "token_id", "id", "token") not in (
        token,
        f"token_id:{token}",
    ):
        return None
    return chosen(item, token) if isinstance(item, Mapping | list | tuple) else None


def _unusable(
    source: Source,
    ids: Sequence[int] | None,
    log_probs: Sequence[float | None],
    sampling: Mapping[str, Any],
    cumulative: Any,
) -> str | None:
    if ids is None:
        return NAMELESS
    if any(value is None for value in log_probs):
        return "only the most likely tokens have one, the chosen token is not among them"
    values = [float(value) for value in log_probs if value is not None]
    if len(values) != len(ids):
        return "their number is not that of the ids"
    if not all(math.isfinite(v) and CLAMPED < v <= LOG_PROB_TOLERANCE for v in values):
        return BEYOND
    if is_number(cumulative) and abs(sum(values) - cumulative) > SUM_TOLERANCE * max(1.0, abs(cumulative)):
        return "they do not sum to cumulative_logprob"
    return _bent(sampling) or _tempered(temperature_of(source, sampling), source.ledger.options.log_probs)


def _bent(sampling: Mapping[str, Any]) -> str | None:
    """Why the rows were not drawn from the full softmax."""
    for name, neutral in _NEUTRAL.items():
        value = sampling.get(name)
        if is_number(value) and float(value) not in neutral:
            return f"sampled with {name}, so not from the full softmax"
    if sampling.get("logit_bias"):
        return "sampled with logit_bias, so not from the full softmax"
    return None


def _tempered(temperature: float | None, mode: str | None) -> str | None:
    if temperature is None or temperature == 1:
        return None
    if temperature == 0:
        return "temperature 0 is no distribution"
    if mode == "processed":
        return None
    if mode == "raw":
        return "raw log-probs are of temperature 1, the rows were sampled at another"
    return (
        "sampled at a temperature other than 1, and the row does not say at which they were taken; "
        "--log-probs says"
    )


def _number(value: Any) -> float | None:
    return None if absent(value) or not is_number(value) else float(value)
