"""Questions with reference solutions, and stored solutions with verdicts: GSM8K's files and their like.

A row is a question and, where there are any, answers of models with a verdict each: under a column named
after the model, in a list, or one a row. Nobody has the log-probs of such answers: their behavior is unknown.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from rein.data import cells
from rein.data import schemas as s
from rein.data.formats.layout import (
    Format,
    Layout,
    Source,
    absent,
    first_of,
    group_name,
    is_text,
    score_of,
    truth,
)
from rein.data.parquet import Row
from rein.data.rejects import BadRow

QUESTIONS: Final = ("question", "problem", "query", "prompt", "instruction")
TRUTHS: Final = ("ground_truth", "final_answer", "expected_answer", "gold", "target", "answer")
TEXTS: Final = (
    "solution",
    "generated_solution",
    "response",
    "output",
    "completion",
    "generation",
    "text",
    "answer",
)
VERDICTS: Final = ("is_correct", "correct", "correctness", "verdict", "passed", "score", "reward", "label")
LISTS: Final = ("solutions", "samples", "generations", "responses", "completions", "answers", "outputs")
LIST_VERDICTS: Final = (
    *VERDICTS,
    "scores",
    "rewards",
    "labels",
    "verdicts",
    "is_corrects",
    "correctness_math_verify",
)
MODELS: Final = ("model", "model_name", "generator", "policy")
MARKED: Final = re.compile(r"(?:####|^A:|^Answer:)\s*(?P<value>\S[^\n]*?)\s*\Z", re.MULTILINE)

SHORT_TRUTH = (
    "the ground truth is what follows the reference solution's final mark (#### or A:), which is kept whole "
    "in extra_info"
)


def _asked(row: Row) -> bool:
    return is_text(first_of(row, *QUESTIONS))


def _verdict_of(value: Any) -> str:
    """The name under which a stored answer has its verdict; empty where the value is none."""
    if not isinstance(value, dict) or not is_text(first_of(value, *TEXTS)):
        return ""
    return next((name for name in VERDICTS if not absent(value.get(name))), "")


def _by_model(row: Row) -> bool:
    return _asked(row) and any(_verdict_of(value) for value in row.values())


def _list_name(row: Row) -> str:
    return next((name for name in LISTS if isinstance(row.get(name), list) and row[name]), "")


def _in_list(row: Row) -> bool:
    name = _list_name(row)
    if not name or not _asked(row):
        return False
    if all(_verdict_of(item) for item in row[name]):
        return True
    beside = next((row[v] for v in LIST_VERDICTS if isinstance(row.get(v), list)), None)
    return all(is_text(item) for item in row[name]) and beside is not None and len(beside) == len(row[name])


def _single(row: Row) -> bool:
    """One answer and its verdict; the question's own `answer` is no answer of a model."""
    return (
        _asked(row)
        and is_text(first_of(row, *TEXTS[:-1]))
        and any(
            isinstance(row.get(name), bool | int | float | str) and not absent(row[name]) for name in VERDICTS
        )
    )


def _reference(row: Row) -> bool:
    answer = first_of(row, "answer", "solution")
    return _asked(row) and is_text(answer) and MARKED.search(answer) is not None


def _common(source: Source) -> Row:
    """What the answers to a question share."""
    question = cells.text(source.take(s.PROMPT, *QUESTIONS), "question")
    given = source.take("reward_model.ground_truth", *TRUTHS)
    short = final(given) if is_text(given) else None
    if short is not None:
        source.note(SHORT_TRUTH)
    return {
        s.PROMPT: [{"role": "user", "content": question}],
        s.GROUP: group_name(question),
        s.DATA_SOURCE: source.take(s.DATA_SOURCE, s.DATA_SOURCE),
        s.REWARD_MODEL: truth(given if short is None else short),
        s.EXTRA_INFO: {} if short is None else {"reference": given},
    }


def _models(source: Source) -> list[Row]:
    names = [name for name, value in source.row.items() if _verdict_of(value)]
    found = [(name, source.take(f"a row with {s.BEHAVIOR_POLICY} {name}", name)) for name in names]
    common = _common(source)
    if not found:
        raise BadRow("no answer", "no column holds an answer with its verdict")
    return [_scored(common, value, name) for name, value in found]


def _list(source: Source) -> list[Row]:
    name = _list_name(source.row)
    if not name:
        raise BadRow("no answer", "the list of answers is empty")
    items = source.take(f"{s.RESPONSE}, {s.SCORE}", name)
    model = source.take(s.BEHAVIOR_POLICY, *MODELS)
    if all(_verdict_of(item) for item in items):
        common = _common(source)
        return [_scored(common, item, str(model or "")) for item in items]
    beside = next((v for v in LIST_VERDICTS if isinstance(source.peek(v), list)), "")
    scores = source.take(s.SCORE, beside) if beside else []
    common = _common(source)
    if len(scores) != len(items):
        raise BadRow("no score", f"{len(items)} answers but {len(scores)} verdicts")
    return [
        {
            **common,
            s.RESPONSE: cells.text(text, name),
            s.SCORE: score_of(score, beside),
            s.BEHAVIOR_POLICY: model,
        }
        for text, score in zip(items, scores, strict=True)
    ]


def _one(source: Source) -> list[Row]:
    response = source.take(s.RESPONSE, *TEXTS[:-1])
    name = next((name for name in VERDICTS if source.peek(name) is not None), VERDICTS[0])
    score = score_of(source.take(s.SCORE, name), name)
    model = source.take(s.BEHAVIOR_POLICY, *MODELS)
    common = _common(source)
    return [
        {**common, s.RESPONSE: cells.text(response, "the answer"), s.SCORE: score, s.BEHAVIOR_POLICY: model}
    ]


def _scored(common: Row, value: dict[str, Any], model: str) -> Row:
    name = _verdict_of(value)
    text = cells.text(first_of(value, *TEXTS), "the answer")
    own = first_of(value, *MODELS)
    return {
        **common,
        s.RESPONSE: text,
        s.SCORE: score_of(value[name], name),
        s.BEHAVIOR_POLICY: own if is_text(own) else model or None,
    }


def _problem(source: Source) -> list[Row]:
    """A question with its worked reference solution, laid out as verl does GSM8K."""
    question = cells.text(source.take(f"{s.PROMPT}, extra_info.question", *QUESTIONS), "question")
    answer = cells.text(
        source.take("reward_model.ground_truth, extra_info.answer", "answer", "solution"), "answer"
    )
    short = final(answer)
    if short is None:
        raise BadRow(
            "no ground truth", "the answer has no final mark: #### or a last line that begins with A:"
        )
    marked = "####" in answer
    return [
        {
            s.PROMPT: [{"role": "user", "content": question}],
            s.RESPONSE: answer,
            s.DATA_SOURCE: source.take(s.DATA_SOURCE, s.DATA_SOURCE) or ("openai/gsm8k" if marked else None),
            s.ABILITY: "math" if marked else None,
            s.REWARD_MODEL: truth(short),
            s.EXTRA_INFO: {"question": question, "answer": answer},
        }
    ]


def final(text: str) -> str | None:
    """What follows the last mark of a worked solution, without commas in numbers; None without a mark."""
    found = list(_ends(text))
    return found[-1].replace(",", "") if found else None


def _ends(text: str) -> Iterator[str]:
    return (match["value"].strip() for match in MARKED.finditer(text))


SOLUTIONS: Final = Format(
    "questions with a worked reference (GSM8K), and stored solutions with verdicts",
    (
        Layout(
            "solutions by model",
            "trajectories",
            "question, one column a model with solution and is_correct",
            _by_model,
            _models,
        ),
        Layout(
            "lists of solutions",
            "trajectories",
            "question, solutions or generations, verdicts",
            _in_list,
            _list,
        ),
        Layout(
            "one solution a row", "trajectories", "question, solution, is_correct or score", _single, _one
        ),
        Layout("worked problems", "prompts", "question, answer with #### n", _reference, _problem),
    ),
)
