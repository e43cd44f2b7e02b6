"""The audit's verdict on a row is the loader's, whatever the row holds and however its columns are typed."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_made import WriteParquet, characters, text_ids

from rein.config.recipe import Data
from rein.data import schemas as s
from rein.data.audit.reading import read
from rein.data.audit.run import way_of
from rein.data.audit.stand_in import stand_in_encoder
from rein.data.files import sources
from rein.data.loader import load_demonstrations, load_pairs, load_prompts, load_trajectories
from rein.data.rejects import Loaded, TooManyBad
from rein.data.rows_prompts import Reading
from rein.data.tokenize import Encoder

ONE, TWO = text_ids("12")
USER = {"role": "user", "content": "1+1="}
ANSWER = {"role": "assistant", "content": "2"}
NAN, INF = float("nan"), float("inf")

# What is changed in a good trajectory; ... takes the column away.
ODD: tuple[dict[str, Any], ...] = (
    {},
    {"response_ids": []},
    {"response_ids": None},
    {"response_ids": None, "response": ""},
    {"response_ids": None, "response": "2", "behavior_log_probs": None},
    {"response_ids": None, "response": "2"},
    {"response_ids": None, "response": " 2"},
    {"response_ids": None, "response": '[{"role": "assistant", "content": ""}]', "behavior_log_probs": None},
    {"response_ids": None, "response": '[{"role": "user", "content": "x"}]'},
    {"prompt": None},
    {"prompt": None, "prompt_ids": [ONE, TWO]},
    {"prompt": ""},
    {"prompt": '  [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]'},
    {"prompt_ids": []},
    {"prompt_ids": [ONE] * 65},
    {"prompt_ids": [ONE, -1]},
    {"prompt_ids": [ONE, None]},
    {"response_ids": [ONE] * 65, "behavior_log_probs": [-1.0] * 65},
    {"response_ids": [TWO, 101]},
    {"response_ids": [-100, TWO]},
    {"response_ids": [TWO, None]},
    {"response_ids": [1, TWO]},
    {"response_ids": [TWO, 1], "behavior_log_probs": [-1.0, NAN]},
    {"response_mask": [False, False]},
    {"response_mask": [True]},
    {"response_mask": [True, None]},
    {"response_mask": [True, False], "behavior_log_probs": [-1.0, 3.0]},
    {"response_mask": [True], "response_ids": None, "response": "2"},
    {"behavior_log_probs": None},
    {"behavior_log_probs": [-1.0]},
    {"behavior_log_probs": [-1.0, NAN]},
    {"behavior_log_probs": [-1.0, None]},
    {"behavior_log_probs": [-INF, -1.0]},
    {"behavior_log_probs": [-1.0, 0.25]},
    {"behavior_log_probs": [-1.0, 5e-5]},
    {"behavior_log_probs": [-1e39, 0.0]},
    {"score": NAN},
    {"score": INF},
    {"score": 1e39},
    {"score": None},
    {"score": None, "token_level_scores": [0.0, 1.0]},
    {"score": 3.0, "token_level_scores": [0.0, 1.0]},
    {"score": 1.0005, "token_level_scores": [0.0, 1.0]},
    {"score": 1.002, "token_level_scores": [0.0, 1.0]},
    {"token_level_scores": [0.0, NAN]},
    {"token_level_scores": [0.0]},
    {"token_level_scores": [0.0, 1.0], "response_ids": None, "response": "2"},
    {"baseline_score": NAN},
    {"baseline_score": 0.5},
    {"temperature": -1.0},
    {"temperature": NAN},
    {"temperature": 0.0},
    {"temperature": 0.0, "behavior_log_probs": [1.0, 1.0]},
    {"temperature": 200.0},
    {"temperature": None},
    {"top_p": 0.0},
    {"top_p": 0.5},
    {"policy_version": 1.5},
    {"policy_version": INF},
    {"finish_reason": "LENGTH"},
    {"finish_reason": "abort"},
    {"finish_reason": None},
    {"group": "g"},
    {"extra_info": {"a": 1}},
    {"reward_model": {"style": "rule", "ground_truth": "2"}},
)


def trajectory(changes: dict[str, Any]) -> dict[str, Any]:
    good = {"prompt": "1+1=", "response_ids": [TWO, 1], "behavior_log_probs": [-0.5, -0.25], "score": 1.0}
    return good | {"temperature": 1.0, "finish_reason": "stop", "policy_version": 0.0} | changes


def complete(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with all columns of any: Arrow takes those of the first."""
    return [dict.fromkeys(key for row in rows for key in row) | row for row in rows]


def verdicts(path: Path, kind: s.Kind, encoder: Encoder, data: Data) -> dict[str, str]:
    """where -> reason, empty for a usable row; each row exactly once."""
    found: dict[str, str] = {}

    def put(where: str, reason: str) -> None:
        assert where not in found
        found[where] = reason

    for source in sources(path):
        for block, rejects in read(source, way_of(source, kind, Reading(encoder, data))):
            for reject in rejects:
                put(reject.where, f"{reject.kind}: {reject.reason}")
            for row in range(0 if block is None else block.rows):
                assert block is not None
                put(block.where(row), "")
    return found


def loaded_verdicts(load: Callable[[], Loaded[Any]]) -> dict[str, str]:
    try:
        loaded = load()
    except TooManyBad as bad:  # no row is left
        loaded = Loaded([], bad.rejects, len(bad.rejects))
    found = {row.where: "" for row in loaded.rows}
    return found | {r.where: f"{r.kind}: {r.reason}" for r in loaded.rejects}


@pytest.fixture(params=["tokenizer", "none"])
def either(request: pytest.FixtureRequest, raw: Encoder) -> Encoder:
    return raw if request.param == "tokenizer" else stand_in_encoder()


@pytest.mark.parametrize("behavior", [None, "stored", "unknown"])
def test_every_kind_of_bad_trajectory_gets_the_loaders_verdict(
    parquet: WriteParquet, either: Encoder, data: Data, behavior: Any
) -> None:
    given = data.model_copy(update={"behavior": behavior})
    path = parquet(complete([trajectory(changes) for changes in ODD]))
    loaded = loaded_verdicts(lambda: load_trajectories(path, either, given, scored=True))
    assert verdicts(path, "trajectories", either, given) == loaded
    assert 25 < sum(map(bool, loaded.values())) < len(ODD) - 15


def test_good_rows_are_not_given_to_the_row_reader(
    parquet: WriteParquet, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the audit of a million rows would take minutes."""
    from rein.data.audit import reading

    given: list[int] = []
    judged = reading._judged
    monkeypatch.setattr(
        reading, "_judged", lambda rows, *rest: given.append(len(rows)) or judged(rows, *rest)
    )
    changes: list[dict[str, Any]] = [
        {},
        {"prompt": None, "prompt_ids": [ONE]},
        {"score": NAN},
        {"group": "a", "response_mask": [True, False]},
    ]
    path = parquet(complete([trajectory(each) for each in changes]))
    assert len(verdicts(path, "trajectories", stand_in_encoder(), data)) == 4
    assert sum(given) == 1


def _types() -> Iterator[tuple[str, Callable[[pa.Table], pa.Table]]]:
    def cast(name: str, kind: pa.DataType) -> Callable[[pa.Table], pa.Table]:
        def change(table: pa.Table) -> pa.Table:
            return table.set_column(table.schema.get_field_index(name), name, table[name].cast(kind))

        return change

    yield "large text", cast("prompt", pa.large_string())
    yield "dictionary text", cast("prompt", pa.dictionary(pa.int32(), pa.string()))
    yield "large lists", cast("response_ids", pa.large_list(pa.int32()))
    yield "fixed lists", cast("response_ids", pa.list_(pa.int64(), 2))
    yield "unsigned ids", cast("response_ids", pa.list_(pa.uint16()))
    yield "ids as floats", cast("response_ids", pa.list_(pa.float64()))
    yield "half precision", cast("behavior_log_probs", pa.list_(pa.float16()))
    yield "double precision", cast("behavior_log_probs", pa.list_(pa.float64()))
    yield "whole scores", cast("score", pa.int8())
    yield "decimal scores", cast("score", pa.decimal128(10, 2))
    yield "scores as text", cast("score", pa.string())
    yield "true and false", cast("score", pa.bool_())
    yield "finish as dictionary", cast("finish_reason", pa.dictionary(pa.int8(), pa.large_string()))
    for name in ("group", "extra_info", "reward_model", "token_level_scores", "top_p", "response"):
        yield f"null {name}", lambda table, name=name: table.append_column(name, pa.nulls(len(table)))  # type: ignore[misc]
    for name, values in {
        "group": [1, None, 3],
        "policy_version": [1, 2, None],
        "behavior_policy": [1.0, NAN, 2.5],
        "data_source": ["a", None, "b"],
        "extra_info": ["{}", "x", None],
        "reward_model": [b"a", None, None],
        "response_mask": [[1, 1], [1, 2], [0, 0]],
        "ground_truth": [[[1]], None, [[2], []]],
        "prompt_ids": [[1.5], [2.0], None],
        "response": [[ANSWER], [USER], None],
        "unread": [{"a": 1}, None, {"b": 2}],
    }.items():
        yield (
            f"{name} {values[0]}",
            lambda table, name=name, values=values: table.append_column(name, pa.array(values)),  # type: ignore[misc]
        )


TYPES = dict(_types())


@pytest.mark.parametrize("kind", TYPES)
def test_types_of_other_peoples_files(tmp_path: Path, kind: str, either: Encoder, data: Data) -> None:
    rows = [trajectory({}), trajectory({"score": 0.0}), trajectory({"finish_reason": None})]
    for row in rows:
        row.pop("policy_version")
    table = TYPES[kind](pa.Table.from_pylist(rows))
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    loaded = loaded_verdicts(lambda: load_trajectories(path, either, data, scored=True))
    assert verdicts(path, "trajectories", either, data) == loaded


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path: Path, data: Data) -> None:
    rows = [trajectory({"prompt": f"prompt {i}"}) for i in range(5)]
    table = pa.Table.from_pylist(rows)
    broken = pa.array([b"a", b"b", b"\xff\xfe", b"d", b"e"], pa.binary())
    text = pa.StringArray.from_buffers(5, *broken.buffers()[1:])
    path = tmp_path / "rows.parquet"
    pq.write_table(table.set_column(0, "prompt", text), path)
    encoder = stand_in_encoder()
    loaded = loaded_verdicts(lambda: load_trajectories(path, encoder, data, scored=True))
    assert verdicts(path, "trajectories", encoder, data) == loaded
    assert [where for where, reason in loaded.items() if reason] == ["rows.parquet row 2"]


PROMPTS: tuple[Any, ...] = (
    [USER],
    [USER, ANSWER],
    [],
    None,
    [{"role": None, "content": "x"}],
    [{"role": "user", "content": None}],
    [{"role": "system", "content": "s"}, USER],
    [USER, None],
)


@pytest.mark.parametrize("name", ["messages", "text"])
def test_prompts_get_the_loaders_verdict(parquet: WriteParquet, data: Data, chat: Encoder, name: str) -> None:
    plain = ["1", "", None, "[1, 2]", '[{"role": "user", "content": "x"}]', " x", "é", "日本", "\u3000x"]
    path = parquet([{"prompt": prompt} for prompt in (PROMPTS if name == "messages" else plain)])
    for encoder in (chat, stand_in_encoder()):
        loaded = loaded_verdicts(lambda encoder=encoder: load_prompts(path, encoder, data))  # type: ignore[misc]
        assert verdicts(path, "prompts", encoder, data) == loaded


def test_pairs_and_demonstrations_get_the_loaders_verdict(
    jsonl: WriteParquet, data: Data, chat: Encoder
) -> None:
    pairs = [
        {"prompt": "1", "chosen": "2", "rejected": "3"},
        {"prompt": "1", "chosen": "2", "rejected": "2"},
        {"prompt": "1", "chosen": "", "rejected": "2"},
        {"chosen": [USER, ANSWER], "rejected": [USER, ANSWER | {"content": "3"}]},
        {"chosen": "2", "rejected": "3"},
        {"prompt": "1", "chosen": "2", "rejected": "3", "margin": NAN},
        {"prompt": [USER, ANSWER], "chosen": "2", "rejected": "3"},
    ]
    path = jsonl(pairs, "pairs.jsonl")
    demonstrations = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER]},
        {"messages": [USER, ANSWER, USER, ANSWER, USER]},
        {"messages": "x"},
        {"messages": None},
    ]
    chats = jsonl(demonstrations, "chats.jsonl")
    with chats.open("a") as file:
        file.write("{broken\n[1]\n")
    for encoder in (chat, stand_in_encoder()):
        for file, kind, load in ((path, "preferences", load_pairs), (chats, "sft", load_demonstrations)):
            loaded = load(file, encoder, data)  # type: ignore[operator]
            assert loaded.rows
            assert verdicts(file, kind, encoder, data) == loaded_verdicts(lambda it=loaded: it)  # type: ignore[arg-type,misc]


def test_many_small_batches_name_rows_as_one_does(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rein.data.audit import reading

    rows = [trajectory({"score": NAN if i % 7 == 0 else 1.0}) for i in range(50)]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=11)
    encoder = stand_in_encoder()
    whole = verdicts(path, "trajectories", encoder, data)
    monkeypatch.setattr(reading, "BATCH_BYTES", 200)
    assert verdicts(path, "trajectories", encoder, data) == whole
    assert [where for where, reason in whole.items() if reason][1] == "rows.parquet row 7"


def test_columns_that_hold_json_text_are_read(tmp_path: Path, data: Data) -> None:
    row = trajectory({"prompt": json.dumps([USER])})
    note = {b"rein.json": b'["prompt"]'}
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([row, row]).replace_schema_metadata(note), path)
    encoder = Encoder(characters(), apply_chat_template=None, stop_ids={1})
    assert set(verdicts(path, "trajectories", encoder, data).values()) == {""}
