"""B01 to B18 and B31: tokens, masks, templates, files, orders and batch sizes."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_made import CHARACTERS, CHAT, FORGETFUL, SPECIAL, byte_pairs, characters, text_ids
from rows_made import own_log_probs, row
from torch import nn
from transformers import AutoModelForSequenceClassification

from rein.config.load import load
from rein.config.recipe import Data, RewardManager, RewardSpec
from rein.data.batches import chunks, epoch_batches, epoch_order, even_cuts, micro_batches
from rein.data.cache import ScoreCache
from rein.data.loader import (
    Loaded,
    load_demonstrations,
    load_pairs,
    load_prompts,
    load_trajectories,
    write_rejects,
)
from rein.data.parquet import write_rows
from rein.data.schemas import TRAJECTORIES, trajectory_row
from rein.data.tokenize import Encoder
from rein.errors import ConfigError, DataError
from rein.functional.preferences import pair_statistics
from rein.models.actor import load_actor
from rein.models.critic import load_critic
from rein.models.load import load_tokenizer, stop_ids
from rein.models.reward_model import load_reward_model
from rein.rewards import build
from rein.rewards.shaping import shape
from rein.stages.train_open import open_job
from rein.tracking.console import Console
from rein.types import Trajectory

PAD, EOS, BOS, END = range(4)
A, B = text_ids("ab")
USER = [{"role": "user", "content": "1+1="}]
DATA = Data(max_prompt_length=64, max_response_length=64, max_bad_fraction=1.0)
PLAIN = CHAT.replace("{{ bos_token }}", "")
SEAM = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
Read = Callable[..., Loaded[Trajectory]]


def encoder(tokenizer: Any, *stops: int) -> Encoder:
    return Encoder(tokenizer, apply_chat_template=None, stop_ids=stops or {EOS})


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Trajectories of two rows: one as the keywords say, and a good one."""

    def of(some: Encoder, data: Data = DATA, scored: bool = False, **columns: Any) -> Loaded[Trajectory]:
        base = {"prompt": "1+1=", "temperature": 1.0, "score": 1.0} | columns
        write(tmp_path / "rows.jsonl", [base, {"prompt": "1", "response_ids": [A, EOS], "score": 0.0}])
        return load_trajectories(tmp_path / "rows.jsonl", some, data, scored=scored)

    return of


def write(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# ---- B01: EOS vanishes from the mask where PAD is EOS


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        ([A, B, EOS, EOS, EOS], [1, 1, 1, 0, 0]),
        ([A, B, EOS], [1, 1, 1]),
        ([EOS, EOS, EOS], [1, 0, 0]),
        ([A, B], [1, 1]),
        ([A, EOS, B, EOS], [1, 1, 1, 1]),  # an EOS inside is part of what was said
    ],
)
def test_the_first_eos_counts_and_the_padding_behind_it_does_not(
    ids: list[int], mask: list[int], read: Read
) -> None:
    found = read(encoder(characters(pad="<eos>")), response_ids=ids).rows[0]
    assert found.response_mask.tolist() == [bool(m) for m in mask]
    assert found.response_ids.tolist() == ids


def test_an_eos_inside_a_prompt_stays_and_a_text_s_own_end_counts(read: Read) -> None:
    some = encoder(characters(pad="<eos>"))
    found = read(some, prompt_ids=[A, EOS, B], response="b").rows[0]
    assert found.prompt_ids.tolist() == [A, EOS, B]
    assert (found.response_ids.tolist(), found.response_mask.all()) == ([B, EOS], True)


# ---- B02: several stop ids


@pytest.mark.parametrize("last", [EOS, END])
def test_each_of_several_stop_ids_finishes_a_response_and_is_trained(last: int, read: Read) -> None:
    found = read(encoder(characters(), EOS, END), response_ids=[A, last, PAD]).rows[0]
    assert found.finish_reason == "stop"
    assert found.response_mask.tolist() == [True, True, False]
    assert found.response == "a"


@pytest.mark.parametrize("given", [7, [7], [1, 7], [7, 9]])
def test_a_list_of_stop_ids_is_read_and_survives_an_export(given: Any, tiny_lm: str, tmp_path: Path) -> None:
    shutil.copytree(tiny_lm, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    actor = load_actor(str(tmp_path / "model"))
    expected = sorted({1, *([given] if isinstance(given, int) else given)})
    assert actor.stop_ids == expected
    actor.save(tmp_path / "saved")
    assert stop_ids(str(tmp_path / "saved"), load_tokenizer(str(tmp_path / "saved"))) == expected


# ---- B03: a response cut off by the length limit


@pytest.mark.parametrize("finish", ["length", "max_tokens", "LENGTH"])
def test_a_response_that_was_cut_off_gets_no_invented_end(finish: str, read: Read) -> None:
    for some in (encoder(characters()), encoder(characters(template=CHAT))):
        assert read(some, response="ab", finish_reason=finish).rows[0].response_ids.tolist() == [A, B]
        assert read(some, response_ids=[A, B], finish_reason=finish).rows[0].finish_reason == "length"
    assert read(encoder(characters()), response="ab").rows[0].response_ids.tolist() == [A, B, EOS]


@pytest.mark.parametrize(("finish", "total"), [("length", 0.5), ("stop", 1.0)])
def test_a_missing_end_costs_its_penalty_subtracted_never_replaced(
    finish: str, total: float, read: Read
) -> None:
    found = read(encoder(characters()), response_ids=[A, B], finish_reason=finish).rows[:1]
    mask = torch.from_numpy(found[0].response_mask)[None]
    manager = RewardManager(missing_eos_penalty=0.5)
    placed = shape(found, mask, manager, max_length=2, statistics=None).token_level_scores
    assert placed.tolist() == [[0, total]]


# ---- B04: the final reward on the pad behind EOS


@pytest.mark.parametrize(
    ("ids", "rewards"), [([A, B, EOS, PAD], [0, 0, 1, 0]), ([A, B, A, B], [0, 0, 0, 1]), ([EOS, PAD], [1, 0])]
)
def test_the_score_stands_on_the_last_token_that_counts(
    ids: list[int], rewards: list[float], read: Read
) -> None:
    found = read(encoder(characters()), response_ids=ids).rows[:1]
    mask = torch.from_numpy(found[0].response_mask)[None]
    placed = shape(found, mask, RewardManager(), max_length=9, statistics=None).token_level_scores
    assert placed.tolist() == [rewards]


# ---- B05: one token's shift between logits, values and mask


@pytest.mark.parametrize(("prompt", "response"), [([3], [4, 5, 6]), ([7, 8], [9]), ([3, 4, 5], [6, 7, 8, 9])])
def test_log_probs_and_values_are_of_the_state_before_the_token(
    prompt: list[int], response: list[int], tiny_lm: str
) -> None:
    """A model that always says the next id; a critic that says the id it has just read."""
    actor, critic = load_actor(tiny_lm), load_critic(tiny_lm)
    with torch.no_grad():
        for model in (actor.model, critic.model):
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
            model.model.norm.weight.fill_(1)
        width = actor.model.config.hidden_size
        actor.model.lm_head.weight = nn.Parameter(100 * torch.eye(width)[:18].roll(1, 0))
        critic.model.score.weight.copy_(torch.arange(width)[None] / width**0.5)
    some = row(prompt, response)
    log_probs, _ = actor.log_probs([some], torch.ones(1))
    assert log_probs.tolist()[0] == pytest.approx([0] * len(response), abs=1e-6)
    assert own_log_probs(actor.model, some).tolist() == pytest.approx([0] * len(response), abs=1e-6)
    before = [*prompt, *response][len(prompt) - 1 : -1]
    assert critic.values([some]).tolist()[0] == pytest.approx(before, abs=1e-3)


# ---- B06: two BOS tokens


@pytest.mark.parametrize("template", [None, CHAT, PLAIN])
@pytest.mark.parametrize("prompt", ["1+1=", USER, [{"role": "system", "content": "s"}, *USER]])
def test_there_is_one_bos_in_every_kind_of_rows(template: str | None, prompt: Any, tmp_path: Path) -> None:
    some = encoder(characters(template=template, adds_bos=True))
    path = write(tmp_path / "a.jsonl", [{"prompt": prompt, "response": "2", "chosen": "2", "rejected": "3"}])
    rows: list[Any] = [
        load_prompts(path, some, DATA).rows[0],
        *load_trajectories(path, some, DATA).rows,
        load_demonstrations(path, some, DATA).rows[0],
        load_pairs(path, some, DATA).rows[0],
    ]
    ones = 0 if template == PLAIN else 1  # in chat mode the template is the only writer
    for found in rows:
        assert found.prompt_ids.tolist().count(BOS) == ones
        assert found.prompt_ids.tolist() == rows[0].prompt_ids.tolist()
        for name in ("response_ids", "chosen_ids", "rejected_ids"):
            assert BOS not in getattr(found, name, np.zeros(0)).tolist()


# ---- B07: prompt tokens are no prefix of the whole


@pytest.mark.parametrize("template", [None, SEAM])
@pytest.mark.parametrize("answer", ["2", "22", ":2"])
def test_a_merge_across_the_seam_trains_the_answer_and_nothing_else(
    template: str | None, answer: str, tmp_path: Path
) -> None:
    some = encoder(byte_pairs((":", "2"), ("=", "2"), template=template))
    path = write(tmp_path / "a.jsonl", [{"prompt": "1+1=", "response": answer}])
    for found in (load_trajectories(path, some, DATA).rows[0], load_demonstrations(path, some, DATA).rows[0]):
        assert found.prompt_ids.tolist() == some.prompt_ids("1+1=").tolist()
        assert some.tokenizer.decode(found.response_ids[found.response_mask].tolist()) == f"{answer}<eos>"


def test_a_template_that_rewrites_old_turns_trains_none_of_them(tmp_path: Path) -> None:
    some = encoder(characters(template=FORGETFUL))
    talk = [*USER, {"role": "assistant", "content": "hm]2"}, *USER, {"role": "assistant", "content": "so]4"}]
    loaded = load_demonstrations(write(tmp_path / "a.jsonl", [{"messages": talk}]), some, DATA)
    (found,) = loaded.rows
    assert some.tokenizer.decode(found.response_ids[found.response_mask].tolist()) == "so]4<eos>"
    assert loaded.notes == ["1 earlier assistant turns are rewritten by the chat template: not trained"]


# ---- B08: decode, then encode again


@pytest.mark.parametrize("stored", [["1", "2"], ["12"], ["1", "2", "12", "1"]])
def test_stored_ids_are_never_made_anew_from_their_text(
    stored: list[str], read: Read, tmp_path: Path
) -> None:
    some = encoder(byte_pairs(("1", "2")))
    ids = [some.tokenizer.get_vocab()[token] for token in stored]  # type: ignore[attr-defined]
    found = read(some, response_ids=ids, response="12", behavior_log_probs=[-1.0] * len(ids)).rows[0]
    assert found.response_ids.tolist() == ids
    assert found.response == "".join(stored)
    write_rows(tmp_path / "again.parquet", [trajectory_row(found)], TRAJECTORIES)
    assert load_trajectories(tmp_path / "again.parquet", some, DATA).rows[0].key == found.key


def test_log_probs_of_text_are_left_out_and_said_and_other_lengths_are_rejected(read: Read) -> None:
    some = encoder(byte_pairs(("1", "2")))
    loaded = read(some, response="12", behavior_log_probs=[-1.0, -1.0])
    assert loaded.rows[0].behavior_log_probs is None
    assert any("log-probs are stored without response_ids" in note for note in loaded.notes)
    for wrong in ([-1.0], [-1.0] * 3, []):
        loaded = read(some, response_ids=[5, 6], behavior_log_probs=wrong)
        assert loaded.rejects[0].reason == f"2 response_ids but {len(wrong)} behavior_log_probs"


# ---- B09: special tokens in the text that a rule scores


@pytest.mark.parametrize("behind", [[EOS], [EOS, PAD, PAD], [EOS, EOS], [END, EOS], []])
def test_the_scored_text_ends_at_the_first_stop_token(behind: list[int], read: Read) -> None:
    some = encoder(characters(), EOS, END)
    found = read(some, response_ids=[*text_ids("<answer>4</answer>"), *behind]).rows[0]
    assert re.search(r"<answer>(\d+)</answer>$", found.response)


def test_other_special_tokens_are_kept_on_request() -> None:
    some = encoder(characters())
    ids = [END, *text_ids("4"), END, EOS, PAD]
    assert some.decode_response(ids) == "4"
    assert some.decode_response(ids, keep_special=True) == "<end>4<end>"


# ---- B10: a saved tokenizer has lost its template or stop id


@pytest.mark.parametrize("own_file", [True, False], ids=["own file", "in the config"])
def test_a_template_renders_the_same_ids_after_every_save(
    own_file: bool, tiny_lm: str, tmp_path: Path
) -> None:
    template, model = "{% for m in messages %}{{ m.content }};{% endfor %}#", tmp_path / "model"
    shutil.copytree(tiny_lm, model)
    if own_file:
        (model / "chat_template.jinja").write_text(template)
    else:
        config = json.loads((model / "tokenizer_config.json").read_text())
        (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 17]}))
    load_actor(str(model)).save(tmp_path / "sft")
    load_actor(str(tmp_path / "sft"), lora_rank=2).save(tmp_path / "tuned")
    load_reward_model(str(tmp_path / "sft")).save(tmp_path / "judge")
    marks = []
    for folder in (model, tmp_path / "sft", tmp_path / "tuned", tmp_path / "judge"):
        tokenizer = load_tokenizer(str(folder))
        some = Encoder(tokenizer, apply_chat_template=None, stop_ids=stop_ids(str(folder), tokenizer))
        assert some.prompt_ids(USER).tolist() == [4, 13, 4, 15, 16, 17]
        assert some.stop_ids == {1, 17}
        marks.append(some.marks())
    assert all(mark == marks[0] for mark in marks)


# ---- B11: tokenizer and embedding sizes differ


@pytest.mark.parametrize("column", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize(
    ("value", "rows", "fits"),
    [(127, 128, True), (128, 128, False), (128, 129, True), (-1, 128, False), (2**40, 128, False)],
)
def test_an_id_is_held_against_the_embedding_and_named(
    column: str, value: int, rows: int, fits: bool, read: Read
) -> None:
    """The tokenizer knows 101 ids; the embedding may have spare rows."""
    some = Encoder(characters(), apply_chat_template=None, stop_ids={EOS}, vocab_size=rows)
    loaded = read(some, **{"prompt_ids": [A], "response_ids": [A, EOS], column: [A, value]})
    assert (len(loaded.rejects) == 0) == fits
    if not fits:
        why = "which is negative" if value < 0 else f"vocabulary {rows}"
        said = f"rows.jsonl row 0: {column}[1] is {value}, {why}"
        assert str(loaded.rejects[0]) == said


# ---- B12: characters split over tokens


@pytest.mark.parametrize("text", ["你好😀", "👩‍👩‍👧‍👦", "مرحبا", "é" * 4])
def test_whole_sequences_are_decoded_limits_count_tokens_and_half_a_sign_is_valid(
    text: str, read: Read, tmp_path: Path
) -> None:
    some = encoder(byte_pairs())
    ids = some.apart(text, False)
    assert len(ids) == len(text.encode())
    found = read(some, response_ids=ids.tolist()).rows[0]
    assert found.response == text
    limit = Data(max_response_length=len(ids) - 1, max_bad_fraction=1.0)
    reason = read(some, limit, response_ids=ids.tolist()).rejects[0].reason
    assert reason == f"the response has {len(ids)} tokens, data.max_response_length is {len(ids) - 1}"
    half = read(some, response_ids=ids.tolist()[:-1]).rows
    write_rows(tmp_path / "half.parquet", [trajectory_row(half[0])], TRAJECTORIES)
    write_rejects(tmp_path / "rejects.jsonl", read(some, prompt=7, response=text).rejects)
    assert load_trajectories(tmp_path / "half.parquet", some, DATA).rows[0].key == half[0].key


# ---- B13: over-long prompts


@pytest.mark.parametrize("stored", [False, True], ids=["text", "stored ids"])
@pytest.mark.parametrize("truncation", ["drop", "left", "right", "error"])
def test_the_limit_holds_after_the_template_on_every_path(
    truncation: str, stored: bool, tmp_path: Path
) -> None:
    some = encoder(characters(template=CHAT))
    bare, marker = len(some.prompt_ids("")), text_ids("(assistant)")
    rows: list[dict[str, Any]] = [
        {"prompt": "1" * size, "response_ids": [A, EOS]} for size in (15, 16, 17, 400)
    ]
    if stored:
        rows = [row | {"prompt_ids": some.prompt_ids(row["prompt"]).tolist()} for row in rows]
    path = write(tmp_path / "a.jsonl", rows)
    data = Data.model_validate({"max_prompt_length": bare + 16, "truncation": truncation})
    for loads in (load_prompts, load_trajectories):
        if truncation == "error":
            with pytest.raises(DataError, match=r"too long: 2 of 4 rows"):
                loads(path, some, data)  # type: ignore[operator]
            continue
        loaded: Loaded[Any] = loads(path, some, data)  # type: ignore[operator]
        over = [] if truncation == "drop" else [bare + 16] * 2
        assert [len(row.prompt_ids) for row in loaded.rows] == [bare + 15, bare + 16, *over]
        assert all(row.prompt_ids.tolist()[-len(marker) :] == marker for row in loaded.rows)
        assert any("2 of 4 rows" in note for note in loaded.notes)


def test_a_filter_that_leaves_nothing_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "1" * 400}] * 3)
    with pytest.raises(DataError, match=r"nothing is left: 3 of 3 rows \(3 prompt over the limit\)"):
        load_prompts(path, encoder(characters()), Data(max_prompt_length=16))


# ---- B14: ground truth of many types


@pytest.mark.parametrize("holder", ["reward_model", "ground_truth", "json"])
@pytest.mark.parametrize(
    ("truth", "response", "expected"),
    [
        (1000, "#### 1000", 1.0),
        ("1,000", "#### 1000", 1.0),
        ("$1,000.00", "#### 1000", 1.0),
        ("\\boxed{1000}", "#### 1000", 1.0),
        (["1000", "1e3"], "#### 1000", 1.0),
        (1000, "#### 1000" + " because 7 and 8" * 30, 1.0),
        (-3, "#### -3", 1.0),
        (-3, "#### 3", 0.0),
        (None, "#### 1000", None),
    ],
)
def test_a_truth_of_any_type_through_the_loader_to_its_score(
    holder: str, truth: Any, response: str, expected: float | None, read: Read
) -> None:
    given: dict[str, Any] = {"reward_model": {"style": "rule", "ground_truth": truth}}
    if holder == "ground_truth":
        given = {"ground_truth": truth}
    if holder == "json":
        given = {"reward_model": json.dumps(given["reward_model"])}
    data = Data(max_response_length=999, max_bad_fraction=1.0)
    rows = read(encoder(characters()), data, response=response, **given).rows[:1]
    assert build([RewardSpec(name="math")], scorer=None)(rows) == [expected]


# ---- B15: preference columns in different layouts


@pytest.mark.parametrize("template", [CHAT, PLAIN])
def test_one_pair_in_three_layouts_is_one_pair_of_ids(template: str, tmp_path: Path) -> None:
    some = encoder(characters(template=template))
    said = {
        name: [{"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "3"))
    }
    layouts: list[dict[str, Any]] = [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": USER, **said},
        {name: [*USER, *turns] for name, turns in said.items()},
    ]
    found = [load_pairs(write(tmp_path / "a.jsonl", [one]), some, DATA).rows[0] for one in layouts]
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        assert len({getattr(one, name).tobytes() for one in found}) == 1, name


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"rejected": ""}, "empty answer"),
        ({"rejected": None}, "empty answer"),
        ({"rejected": "2"}, "chosen equals rejected"),
        ({"rejected": [{"role": "assistant", "content": "2"}]}, "chosen equals rejected"),
        ({"chosen": [*USER, {"role": "user", "content": "2"}]}, "answer ends in no answer"),
    ],
)
def test_a_pair_that_says_nothing_is_reported(changed: dict[str, Any], kind: str, tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    loaded = load_pairs(write(tmp_path / "a.jsonl", [good, good | changed]), encoder(characters()), DATA)
    assert [reject.kind for reject in loaded.rejects] == [kind]


# ---- B16: shuffling and seeds


def orders(tiny_lm: str, folder: Path, *words: str) -> list[list[str]]:
    """The batches of two epochs, by prompt."""
    rows = [{"prompt": f"{i}+1=", "response": "#2", "score": float(i % 2)} for i in range(8)]
    write(folder / "rows.jsonl", rows)
    base = f"""
        model.path={tiny_lm} out={folder}/run data.train_files={folder}/rows.jsonl data.train_batch_size=4
        actor.ppo_mini_batch_size=2 data.holdout_fraction=0.3 trainer.total_epochs=2 data.train_batch_size=4
        algorithm.method=bc
    """.split()
    recipe = load(None, list(dict.fromkeys([*base, *words])))[0]
    job = open_job(recipe, Console(quiet=True), rehearsal=True)
    np.random.rand(5)
    torch.rand(5)  # what an evaluation might draw
    batches = [[row.where for row in job.rows_of(batch)] for batch in range(job.batches)]
    plan = [str(update.rows) for update in job.updates_of(job.train_rows, 0)]
    job.close()
    return [*batches, plan]


def test_the_order_follows_from_the_data_seed_alone(tiny_lm: str, tmp_path: Path) -> None:
    first = orders(tiny_lm, tmp_path, "seed=1", "data.seed=5")
    assert orders(tiny_lm, tmp_path, "seed=1", "data.seed=5") == first
    assert orders(tiny_lm, tmp_path, "seed=2", "data.seed=5") == first
    assert orders(tiny_lm, tmp_path, "seed=1", "data.seed=6") != first
    assert orders(tiny_lm, tmp_path, "seed=5") == first  # by default the data's is the recipe's
    assert first[0] != first[len(first) // 2]  # epoch 2


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_epochs_and_seeds_differ_and_each_order_is_whole(seed: int) -> None:
    first, second = epoch_order(8, seed, 0, True), epoch_order(8, seed, 1, True)
    assert first == epoch_order(8, seed, 0, True)
    assert len({tuple(first), tuple(second), tuple(epoch_order(8, seed + 1, 0, True))}) == 3
    assert sorted(first) == sorted(second) == list(range(8))


# ---- B17: a stale or shared data cache


def test_files_of_one_name_and_a_file_written_anew_are_read_as_they_are(tmp_path: Path) -> None:
    some = encoder(characters())
    for run in "ab":
        write(tmp_path / run / "train.jsonl", [{"prompt": run}])
    both = load_prompts([str(tmp_path / run / "train.jsonl") for run in "ab"], some, DATA)
    assert [row.text for row in both.rows] == ["a", "b"]
    assert len({row.where for row in both.rows}) == 2
    write(tmp_path / "a" / "train.jsonl", [{"prompt": "c"}])
    assert [row.text for row in load_prompts(tmp_path / "a" / "train.jsonl", some, DATA).rows] == ["c"]
    with pytest.raises(DataError, match="nothing is left"):
        load_prompts(
            tmp_path / "b" / "train.jsonl", encoder(characters(template=CHAT)), Data(max_prompt_length=2)
        )


@pytest.mark.parametrize("other", [{"response_ids": [B, EOS]}, {"prompt": "2"}, {"temperature": 0.5}])
def test_a_kept_number_belongs_to_content_not_to_a_place(
    other: dict[str, Any], read: Read, tmp_path: Path
) -> None:
    some, base = encoder(characters()), {"response_ids": [A, EOS]}
    one, two = read(some, **base).rows[0], read(some, **base | other).rows[0]
    assert one.where == two.where
    cache = ScoreCache(tmp_path, "ref_log_probs", {"weights": "w", "tokenizer": "t"})
    cache.add({one.key: np.array([-1.0, -2.0], dtype=np.float32)})
    assert cache.get(two.key) is None
    assert ScoreCache(tmp_path, "ref_log_probs", {"weights": "v", "tokenizer": "t"}).get(one.key) is None
    assert ScoreCache(tmp_path, "ref_log_probs", {"weights": "w", "tokenizer": "t"}).get(one.key) is not None


# ---- B18: batch sizes that do not divide, or become 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("data.train_batch_size=2 actor.ppo_mini_batch_size=4", "actor.ppo_mini_batch_size 4 is larger than"),
        ("actor.ppo_mini_batch_size=0", "actor.ppo_mini_batch_size"),
        ("actor.use_dynamic_bsz=false actor.ppo_micro_batch_size=0", "actor.ppo_micro_batch_size"),
        ("actor.use_dynamic_bsz=false", "give actor.ppo_micro_batch_size"),
        ("data.train_batch_size=0", "data.train_batch_size"),
        ("actor.ppo_max_token_len_per_gpu=0", "ppo_max_token_len_per_gpu"),
        ("sft.batch_size=-1", "sft.batch_size"),
    ],
)
def test_a_size_that_makes_no_batch_is_refused_at_the_start(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load(None, words.split())


@pytest.mark.parametrize(("rows", "size"), [(6, 4), (7, 2), (1, 64), (12, 5)])
def test_a_size_that_does_not_divide_drops_no_row(rows: int, size: int) -> None:
    everything = list(range(rows))
    for parts in (
        chunks(everything, size),
        epoch_batches([[i] for i in everything], size, 0, 0, True),
        even_cuts([[i] for i in everything], -(-rows // size)),
        micro_batches([1] * rows, size),
    ):
        assert sorted(row for part in parts for row in part) == everything
        assert all(0 < len(part) <= size for part in parts)


@pytest.mark.parametrize("sizes", [[2, 2, 2, 2], [1, 3, 2, 2], [4, 1, 1, 2], [3, 3, 1, 1]])
def test_kept_groups_of_unequal_size_lie_whole_in_one_update(
    sizes: list[int], tiny_lm: str, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"{g}+1=", "response": f"#{i}", "score": float(i % 2)}
        for g, size in enumerate(sizes)
        for i in range(size)
    ]
    write(tmp_path / "rows.jsonl", rows)
    words = f"""
        model.path={tiny_lm} out={tmp_path}/run data.train_files={tmp_path}/rows.jsonl data.keep_groups=true
        data.train_batch_size=8 actor.ppo_mini_batch_size=4 data.holdout_fraction=0 actor.ppo_epochs=3
    """.split()
    job = open_job(load(None, words)[0], Console(quiet=True), rehearsal=True)
    plan = job.updates_of(batch := job.rows_of(0), 0)
    assert len(plan) == job.total_updates - job.fit_steps
    for role in ("critic", "actor"):
        own = [update.rows for update in plan if update.role == role]
        for epoch in chunks(own, len(own) // 3):
            assert sorted(i for rows_ in epoch for i in rows_) == list(range(8))
            for group in {one.group for one in batch}:
                holds = [any(batch[i].group == group for i in rows_) for rows_ in epoch]
                assert sum(holds) == 1
    job.close()
    with pytest.raises(ConfigError, match=r"actor\.ppo_mini_batch_size 1: prompt .* set it to \d or more"):
        open_job(
            load(None, [*words[:-3], "actor.ppo_mini_batch_size=1", "data.holdout_fraction=0"])[0],
            Console(quiet=True),
            rehearsal=True,
        )


# ---- B31: a reward model without PAD; scores rounded to ties


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_reward_model_has_a_pad_that_ends_nothing_and_keeps_it(
    dtype: str, tiny_lm: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_lm, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("pad_token")
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    judge = load_reward_model(str(model), dtype=dtype)
    with torch.no_grad():
        judge.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    judge.save(tmp_path / "judge")
    pad = load_tokenizer(str(tmp_path / "judge")).pad_token_id
    assert pad == judge.model.config.pad_token_id != EOS
    rows = [row([3, 4], [5, 1]), row([3], [4, 5, 6, 7, 1])]
    texts = [[*r.prompt_ids.tolist(), *r.response_ids.tolist()] for r in rows]
    ids = torch.tensor([text + [pad] * (6 - len(text)) for text in texts])
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "judge")
    with torch.no_grad():
        found = plain(input_ids=ids, attention_mask=(ids != pad).long()).logits.squeeze(-1)
    torch.testing.assert_close(judge.scores(rows).float(), found.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "rejected", "accuracy", "ties"),
    [([1.0, 2.0], [1.0, 1.0], 0.5, 0.5), ([1.0], [1.0 + 1e-6], 0.0, 0.0), ([3.0, 3.0], [3.0, 3.0], 0.0, 1.0)],
)
def test_ties_are_counted_apart_from_wins(
    chosen: list[float], rejected: list[float], accuracy: float, ties: float
) -> None:
    found = pair_statistics(torch.tensor(chosen), torch.tensor(rejected))
    assert (found["accuracy"], found["ties"]) == (accuracy, ties)


def test_the_tokens_of_these_tests_are_what_they_say() -> None:
    assert [SPECIAL[i] for i in (PAD, EOS, BOS, END)] == ["<pad>", "<eos>", "<bos>", "<end>"]
    assert len(SPECIAL) + len(CHARACTERS) == 101
