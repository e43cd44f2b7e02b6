"""A reward model's folder is a plain sequence-classification model with the same scores."""

import json
from pathlib import Path

import pytest
import torch
from rows_made import Row, random_rows, row
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from rein.models.load import load_tokenizer
from rein.models.reward_model import RewardModel, load_reward_model


def with_a_head(model: RewardModel) -> RewardModel:
    with torch.no_grad():
        model.model.score.weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def saved(tiny_lm: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[RewardModel, Path]:
    model = with_a_head(load_reward_model(tiny_lm))
    folder = tmp_path_factory.mktemp("reward") / "model"
    model.save(folder)
    return model, folder


def without_pad(folder: Path, specials: list[str]) -> str:
    """A Llama-shaped model whose tokenizer has EOS `</s>` and no PAD."""
    vocabulary = {token: i for i, token in enumerate([*specials, *"0123456789"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=None)),
        eos_token="</s>",
        unk_token="<unk>" if "<unk>" in specials else None,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=vocabulary["</s>"], bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def plain_scores(folder: Path, rows: list[Row]) -> torch.Tensor:
    """A right-padded batch through transformers alone."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = load_tokenizer(str(folder))
    texts = [[*some.prompt_ids.tolist(), *some.response_ids.tolist()] for some in rows]
    width = max(map(len, texts))
    ids = torch.tensor([text + [tokenizer.pad_token_id] * (width - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask).logits
    return logits.squeeze(-1)


def test_plain_transformers_gives_the_same_scores(saved: tuple[RewardModel, Path]) -> None:
    model, folder = saved
    rows = [row([3, 4], [5, 6, 1]), row([7], [1]), *random_rows(6)]
    rows = [some for some in rows if some.response_ids[-1] != 0]  # a pad token is no end of an answer
    with torch.no_grad():
        mine = model.scores(rows)
    assert mine.dtype == torch.float32
    torch.testing.assert_close(plain_scores(folder, rows), mine, atol=1e-5, rtol=1e-5)
    assert mine.std() > 1e-3


def test_the_folder_names_nothing_of_this_package(saved: tuple[RewardModel, Path]) -> None:
    _, folder = saved
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert "rein" not in json.dumps(config)
    assert not list(folder.glob("*.py"))


def test_the_pad_id_is_in_config_and_tokenizer(saved: tuple[RewardModel, Path]) -> None:
    _, folder = saved
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == 0
    assert load_tokenizer(str(folder)).pad_token_id == 0


@pytest.mark.parametrize("specials", [["<unk>", "</s>"], ["</s>"]], ids=["with unk", "without"])
def test_a_model_without_pad_gets_one_that_ends_no_answer(specials: list[str], tmp_path: Path) -> None:
    """Answers end in EOS; were EOS also PAD, transformers would score the token before it."""
    model = with_a_head(load_reward_model(without_pad(tmp_path / "llama", specials)))
    model.save(tmp_path / "reward")
    config = json.loads((tmp_path / "reward" / "config.json").read_text())
    tokenizer = load_tokenizer(str(tmp_path / "reward"))
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    eos = specials.index("</s>")
    rows = [row([3, 4], [5, 6, eos]), row([7], [eos])]
    with torch.no_grad():
        mine = model.scores(rows)
    torch.testing.assert_close(plain_scores(tmp_path / "reward", rows), mine, atol=1e-5, rtol=1e-5)


def test_near_answers_of_a_narrow_model_do_not_tie(tiny_lm: str) -> None:
    model = with_a_head(load_reward_model(tiny_lm))
    model.model.to(torch.bfloat16)
    rows = [row([3, 4, 5, 6, 7, 8], [9, digit]) for digit in range(3, 13)]
    with torch.no_grad():
        scores = model.scores(rows)
    assert scores.dtype == torch.float32
    assert len(set(scores.tolist())) == 10


def test_rows_are_scored_apart_and_in_their_order(saved: tuple[RewardModel, Path]) -> None:
    model, _ = saved
    rows = random_rows(7, seed=4)
    with torch.no_grad():
        together = model.scores(rows)
        apart = torch.cat([model.scores([some]) for some in rows])
    torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-5)
