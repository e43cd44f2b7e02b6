"""What the audit counts, proved on small files whose facts are known."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_made import WriteParquet, text_ids

from rein.config.recipe import Data
from rein.data.audit import FACTS, audit
from rein.data.audit.hashing import BLOCK, list_keys
from rein.data.audit.numbers import correlation, distribution
from rein.data.audit.sample import Sample, near_duplicates, repetition
from rein.data.tokenize import Encoder
from rein.errors import DataError

ONE, TWO = text_ids("12")
NAN = float("nan")


def rows(n: int = 8, **columns: Any) -> list[dict[str, Any]]:
    """n good trajectories: two answers a prompt, lengths 2, 3, ..., scores 0, 1, 0, 1, ..."""
    return [
        {
            "prompt": f"question {i // 2}",
            "response_ids": [ONE] * (i + 1) + [1],
            "behavior_log_probs": [-0.5] * (i + 1) + [0.0],
            "score": float(i % 2),
            "finish_reason": "stop",
            "temperature": 1.0,
        }
        | columns
        for i in range(n)
    ]


def facts(path: Path, data: Data, **options: Any) -> dict[str, Any]:
    return audit(path, data, **options)[0]


def test_every_fact_that_is_written_is_explained(parquet: WriteParquet, data: Data) -> None:
    assert set(facts(parquet(rows()), data)) == set(FACTS)


def test_the_same_rows_give_the_same_facts_from_parquet_and_from_json_lines(
    parquet: WriteParquet, jsonl: WriteParquet, data: Data, raw: Encoder
) -> None:
    """One passes the vectorised checks, the other the loader's reader, row by row."""
    made = [
        *rows(),
        *rows(3),
        *rows(2, score=NAN),
        *rows(1, temperature=0.0),
        *rows(1, finish_reason="length"),
    ]
    made[3]["prompt"] = [{"role": "user", "content": "question 1"}]
    for row in made:
        if isinstance(row["prompt"], str):
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]
    for row in made[:4]:
        row |= {"group": "g", "policy_version": 3, "behavior_policy": "sft"}
    made = [dict.fromkeys(key for row in made for key in row) | row for row in made]
    for encoder in (raw, None):
        both = [
            facts(write(made, name), data, encoder=encoder)
            for write, name in ((parquet, "a.parquet"), (jsonl, "a.jsonl"))
        ]
        for each in both:
            del each["files"]
            for first in each["rows"]["first"].values():
                for named in first:
                    named["where"] = named["where"].split()[-1]
        assert both[0] == both[1]


def test_text_prompts_and_one_user_turn_are_one_prompt(jsonl: WriteParquet, data: Data) -> None:
    turn = [{"role": "user", "content": "question 0"}]
    found = facts(
        jsonl([*rows(2), *rows(1, prompt=turn), *rows(1, prompt=str(turn).replace("'", '"'))]), data
    )
    assert found["duplicates"]["distinct_prompts"] == 1
    assert found["duplicates"]["copies"] == 2


def test_copies_groups_and_their_spread(parquet: WriteParquet, data: Data) -> None:
    flat = rows(4, score=1.0, prompt="flat")
    found = facts(parquet([*rows(8), *rows(8)[:3], *flat, *rows(1, prompt="alone")]), data)
    assert (found["duplicates"]["copies"], found["duplicates"]["most_copies"]) == (3, 2)
    groups = found["groups"]
    assert (groups["groups"], groups["single"], groups["several"]) == (6, 1, 5)
    assert (groups["without_spread"], groups["without_spread_rows"]) == (1, 4)
    assert groups["answers"]["max"] == 4


def test_stored_groups_decide_over_prompts(parquet: WriteParquet, data: Data) -> None:
    found = facts(parquet(rows(8, group="all")), data)
    assert (found["groups"]["groups"], found["groups"]["answers"]["max"]) == (1, 8)


def test_lengths_are_tokens_where_ids_are_stored_else_characters(parquet: WriteParquet, data: Data) -> None:
    found = facts(parquet(rows()), data)["lengths"]
    assert (found["prompt"]["unit"], found["response"]["unit"]) == ("characters", "tokens")
    spread = found["response"]["distribution"]
    assert (spread["min"], spread["p50"], spread["max"], spread["mean"]) == (2, 5.5, 9, 5.5)
    assert found["prompt"]["distribution"]["max"] == len("question 0")


def test_a_tokenizer_measures_text_in_tokens(parquet: WriteParquet, data: Data, raw: Encoder) -> None:
    made = [{"prompt": "1+1=", "response": "22"}, {"prompt": "1+1=", "response": "2222"}]
    found = facts(parquet(made), data, encoder=raw)
    assert found["lengths"]["response"]["unit"] == "tokens"
    assert found["lengths"]["response"]["distribution"]["values"] == [[3.0, 1], [5.0, 1]]
    assert found["endings"]["missing_end"] == 0


def test_endings(parquet: WriteParquet, data: Data, raw: Encoder) -> None:
    cut = rows(2, response_ids=[ONE] * 9, behavior_log_probs=[-1.0] * 9, finish_reason="length")
    found = facts(parquet([*rows(5), *cut, *rows(1, finish_reason=None)]), data)["endings"]
    assert [found[name] for name in ("stop", "length", "other", "unknown")] == [5, 2, 0, 1]
    assert found["truncated_share"] == pytest.approx(2 / 7)
    assert (found["longest"], found["at_longest"]) == (9, 2)
    assert (found["last_id"], found["missing_end"]) == ({"id": 1, "share": 6 / 8}, None)
    known = facts(parquet([*rows(5), *cut, *rows(1, finish_reason=None)]), data, encoder=raw)["endings"]
    assert (known["stop"], known["missing_end"]) == (6, 2)  # an end token says that a response has finished


def test_behavior_counts_tokens_that_count(parquet: WriteParquet, data: Data) -> None:
    made = rows(4)
    for row in made:
        row["response_mask"] = [True] * len(row["response_ids"])
    made[3] |= {
        "response_mask": [True, False, True, True, True],
        "behavior_log_probs": [-8.0, -99.0, 5e-5, 0.0, 0.0],
    }
    found = facts(parquet(made), data)["behavior"]
    assert (found["rows"], found["tokens"], found["above_zero"]) == (4, 13, 1)
    assert found["mean"] == pytest.approx((-0.5 * 6 - 8.0) / 13, abs=1e-5)
    assert found["zero_share"] == pytest.approx(5 / 13)
    assert (found["lowest"], found["at_lowest"]) == (-8.0, 1)
    assert found["below"] == {"5": 1 / 13, "10": 0.0, "20": 0.0}


def test_rows_written_greedily_have_no_behavior(parquet: WriteParquet, data: Data) -> None:
    assert facts(parquet(rows(4, temperature=0.0)), data)["behavior"] is None


def test_score_against_length(parquet: WriteParquet, data: Data) -> None:
    made = rows(40)
    for i, row in enumerate(made):
        row["score"] = i + 3 * (-1.0) ** i
    found = facts(parquet(made), data)["score"]
    against, lengths = found["against_length"], np.arange(40)
    assert against["r"] == pytest.approx(np.corrcoef(lengths, [row["score"] for row in made])[0, 1])
    assert against["low"] < against["r"] < against["high"]
    assert len(found["by_length"]) == 10


def test_special_tokens_marks_and_blanks_are_counted_by_row(
    jsonl: WriteParquet, parquet: WriteParquet, data: Data
) -> None:
    turns = [{"role": "system", "content": "<|im_end|>"}, {"role": "user", "content": "a <|im_end|></s>"}]
    made = [
        {"prompt": turns, "response": "fine"},
        {"prompt": [{"role": "user", "content": "b"}], "response": "[INST] \ufffd"},
        {"prompt": [{"role": "user", "content": "<mine>"}], "response": " \n"},
    ]
    for write, name in ((jsonl, "t.jsonl"), (parquet, "t.parquet")):
        sides = facts(write(made, name), data, own_tokens=["<mine>"])["text"]["sides"]
        assert sides["prompt"]["special"] == {"<|im_end|>": 1, "</s>": 1, "<mine>": 1}
        assert (sides["prompt"]["with_special"], sides["prompt"]["rows"]) == (2, 3)
        assert sides["response"]["special"] == {"[INST]": 1}
        assert (sides["response"]["replacement_marks"], sides["response"]["blank"]) == (1, 1)


def test_prompts_shared_with_an_evaluation_file(
    parquet: WriteParquet, jsonl: WriteParquet, data: Data, raw: Encoder
) -> None:
    against = jsonl(
        [{"prompt": "question 1"}, {"prompt": [{"role": "user", "content": "question 3"}]}, {"prompt": "?"}]
    )
    found = facts(parquet(rows()), data, against=against)["overlap"]
    assert (found["against_prompts"], found["shared_prompts"], found["shared_rows"]) == (3, 2, 4)
    assert found["examples"][0] == {"where": "rows.parquet row 2", "prompt": "question 1"}
    ids = parquet(rows(2, prompt=None, prompt_ids=text_ids("question 1")), "ids.parquet")
    assert facts(ids, data, against=against, encoder=raw)["overlap"]["shared_prompts"] == 1


def test_pairs(jsonl: WriteParquet, data: Data) -> None:
    made = [{"prompt": "q", "chosen": "long answer", "rejected": "no"}] * 3
    made += [{"prompt": "q", "chosen": "a", "rejected": "a"}, {"prompt": "q", "chosen": "", "rejected": "a"}]
    found = facts(jsonl(made), data)
    assert found["kind"] == "preferences"
    assert (found["pairs"]["identical"], found["pairs"]["empty"], found["pairs"]["rows"]) == (1, 1, 3)
    assert found["pairs"]["chosen_longer_share"] == 1.0
    assert found["duplicates"]["copies"] == 2


def test_a_file_of_rejects_has_facts_and_a_file_of_nothing_is_an_error(
    parquet: WriteParquet, data: Data
) -> None:
    found, rejects = audit(parquet(rows(3, score=NAN)), data)
    assert (found["rows"]["usable"], found["rows"]["by_reason"]) == (0, {"score not finite": 3})
    assert len(rejects) == 3
    with pytest.raises(DataError, match="no rows"):
        audit(parquet([], schema=pa.schema([("prompt", pa.string())])), data)


def test_columns_of_no_kind_are_answered_with_the_nearest_and_with_convert(
    jsonl: WriteParquet, data: Data
) -> None:
    path = jsonl([{"question": "1+1", "answer": "2"}])
    with pytest.raises(DataError, match=r"did you mean `question`\?.*`rein convert`"):
        audit(path, data)
    assert facts(path, data, sft=("question", "answer"))["rows"]["usable"] == 1


def test_one_row_and_huge_rows(tmp_path: Path, data: Data) -> None:
    wide = data.model_copy(update={"max_response_length": 10**6})
    long = rows(1, response_ids=[ONE] * 300_000, behavior_log_probs=[-1.0] * 300_000)
    path = tmp_path / "huge.parquet"
    pq.write_table(pa.Table.from_pylist(long * 3), path)
    found = facts(path, wide)
    assert (found["rows"]["usable"], found["duplicates"]["copies"]) == (3, 2)
    assert found["behavior"]["tokens"] == 900_000


def test_equal_lists_have_equal_keys_wherever_they_stand() -> None:
    rng = np.random.default_rng(0)
    lengths = np.concatenate((rng.integers(0, 50, 3000), [BLOCK + 5, 3 * BLOCK, 0]))
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    values = rng.integers(0, 40, offsets[-1])
    keys = list_keys(values, offsets)
    contents = [values[a:b].tobytes() for a, b in pairwise(offsets)]
    assert len(set(keys.tolist())) == len(set(contents))
    alone = [list_keys(values[a:b], np.array([0, b - a]))[0] for a, b in pairwise(offsets)]
    np.testing.assert_array_equal(keys, alone)
    assert list_keys(np.array([1, 2]), np.array([0, 2])) != list_keys(np.array([2, 1]), np.array([0, 2]))


def test_near_copies_are_found_and_different_rows_are_not() -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 5000, 200) for _ in range(200)]
    changed = [text.copy() for text in texts[:20]]
    for text in changed:
        text[100] = 7777
    sample = Sample()
    content = [*texts, *changed, texts[0]]
    for place in sample.add(np.array([*range(220), 0], np.uint64) + np.uint64(1)):
        sample.keep(place, len(content), content[place])
    assert near_duplicates(sample) == (220, 40)


def test_the_sample_is_bounded_and_the_same_in_pieces() -> None:
    keys = np.arange(1, 5001, dtype=np.uint64)
    whole, pieces = Sample(size=64), Sample(size=64)
    for sample, step in ((whole, 5000), (pieces, 17)):
        for start in range(0, 5000, step):
            part = keys[start : start + step]
            for place in sample.add(part):
                sample.keep(place, len(part), np.array([start + place]))
    assert whole.units.keys() == pieces.units.keys() == whole.keys.keys()
    assert len(whole.units) == 64
    assert 1500 < np.mean(list(whole.units)) < 3500


def test_repetition_is_the_share_of_grams_seen_before() -> None:
    assert repetition(np.arange(10, dtype=np.uint64)) == 0.0
    assert repetition(np.zeros(10, dtype=np.uint64)) == pytest.approx(6 / 7)
    assert repetition(np.arange(4, dtype=np.uint64)) is None


def test_histograms_hold_every_value() -> None:
    rng = np.random.default_rng(0)
    tailed = np.append(rng.integers(0, 100, 5000), 10**6)
    for values in (
        tailed,
        rng.normal(size=999),
        np.array([5]),
        np.array([1, 1]),
        rng.integers(0, 3, 50),
        np.array([-3e38, 3e38]),
    ):
        found = distribution(values)
        assert found is not None
        assert sum(found["histogram"]["counts"]) == len(values)
        assert len(found["histogram"]["edges"]) == len(found["histogram"]["counts"]) + 1
    found = distribution(tailed)
    assert found is not None
    assert found["histogram"]["open"]


def test_a_constant_has_no_correlation() -> None:
    assert correlation(np.ones(9), np.arange(9)) is None
    found = correlation(np.arange(9), np.arange(9))
    assert found is not None
    assert found["r"] == pytest.approx(1.0)
