"""A prompt that several rows of a pack answer is computed once, and nothing that is said changes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from rows_made import VOCABULARY, Row, own_log_probs, random_rows, row
from torch import Tensor
from training_made import gradients_of
from transformers import AutoModelForCausalLM as Auto
from transformers import GPT2Config

from rein.models.actor import Actor, load_actor
from rein.models.attention import segments
from rein.models.critic import Critic, load_critic
from rein.models.packing import Layout, SharedPrompt, pack
from rein.models.reference import Reference
from rein.models.reward_model import RewardModel, load_reward_model
from rein.models.tiny import tiny_tokenizer
from rein.sharing import PAYS_FROM, families


def answers(count: int, *, prompt: int = PAYS_FROM + 4, seed: int = 0, longest: int = 9) -> list[Row]:
    """Rows of one prompt."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, VOCABULARY, prompt).tolist()
    return [
        row(ids, draw.integers(0, VOCABULARY, draw.integers(1, longest + 1)).tolist()) for _ in range(count)
    ]


def mixed() -> list[Row]:
    """Two shared prompts of 4 and 2 rows, a prompt of one row, short prompts, in no order."""
    rows = [*answers(4), *answers(2, seed=1), *answers(1, seed=2), *random_rows(3)]
    order = np.random.default_rng(3).permutation(len(rows))
    return [rows[i] for i in order]


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its norms are float64 where the model is; those of llama's kind round to float32 on the way."""
    folder = tmp_path_factory.mktemp("gpt")
    torch.manual_seed(0)
    Auto.from_config(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=64, pad_token_id=0)
    ).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(str(folder))
    return str(folder)


@pytest.fixture(scope="module")
def actor(gpt: str) -> Actor:
    return load_actor(gpt, dtype="float64")


@pytest.fixture(scope="module")
def critic(gpt: str) -> Critic:
    made = load_critic(gpt, dtype="float64")
    torch.nn.init.normal_(made.model.score.weight)
    return made


@pytest.fixture(scope="module")
def judge(gpt: str) -> RewardModel:
    made = load_reward_model(gpt, dtype="float64")
    torch.nn.init.normal_(made.model.score.weight)
    return made


def test_rows_are_families_by_prompt_and_short_prompts_are_not() -> None:
    long, short = list(range(PAYS_FROM)), list(range(PAYS_FROM - 1))
    rows = [row(long, [1]), row(short, [1]), row(long, [2, 3]), row(short, [2])]
    assert families(rows) == [[0, 2], [1], [3]]


def test_a_shared_pack_by_hand() -> None:
    prompt = list(range(PAYS_FROM))
    packed = pack([row(prompt, [7, 8]), row([5], [6]), row(prompt, [9])], share=True)
    p = PAYS_FROM
    assert packed.input_ids.tolist() == [[5, 6, *prompt, 9, 7, 8]]
    assert packed.position_ids.tolist() == [[0, 1, *range(p), p, p, p + 1]]
    assert packed.layout.prompts == [SharedPrompt(2, 2 + p, 2 + p, 5 + p)]
    assert packed.states.tolist() == [0, 1 + p, 1 + p, 3 + p]
    assert packed.targets.tolist() == [6, 9, 7, 8]
    assert packed.last.tolist() == [4 + p, 1, 2 + p]
    assert packed.spread(packed.targets).tolist() == [[7, 8], [6, 0], [9, 0]]


def test_every_token_that_is_read_lies_in_the_shared_pack_once() -> None:
    rows = mixed()
    packed = pack(rows, share=True)
    saved = sum((len(f) - 1) * len(rows[f[0]].prompt_ids) for f in families(rows))
    assert saved > 0
    assert packed.input_ids.shape[1] == sum(len(r.prompt_ids) + len(r.response_ids) for r in rows) - saved
    position = 0
    for group in packed.layout.groups:
        assert group.start == position
        position = group.stop
    assert position == packed.input_ids.shape[1]


def same_both_ways(
    model: Actor | Critic | RewardModel, say: Callable[[], Tensor], *, within: float = 1e-9
) -> None:
    found = []
    for shares in (True, False):
        model.shares_prompts = shares
        said = say()
        found.append([said, *gradients_of(model.model, said.sin().sum())])
    model.shares_prompts = True
    assert len(found[0]) > 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=within, rtol=within)


def test_actor_critic_and_judge_say_the_same_with_the_same_gradients(
    actor: Actor, critic: Critic, judge: RewardModel
) -> None:
    rows = mixed()
    ones = torch.ones(len(rows), dtype=torch.float64)

    def both() -> Tensor:
        log_probs, entropy = actor.log_probs(rows, ones, entropy=True)
        assert entropy is not None
        return torch.stack([log_probs, entropy])

    same_both_ways(actor, both)
    same_both_ways(critic, lambda: critic.values(rows))
    same_both_ways(judge, lambda: judge.scores(rows))


def test_what_is_said_of_shared_rows_is_what_the_model_says_of_each_alone(actor: Actor) -> None:
    rows = mixed()
    with torch.no_grad():
        found, _ = actor.log_probs(rows, torch.ones(len(rows)))
        for i, some in enumerate(rows):
            own = own_log_probs(actor.model, some)
            torch.testing.assert_close(found[i, : len(own)], own, atol=1e-9, rtol=0)


def test_answers_to_one_prompt_do_not_see_each_other(actor: Actor) -> None:
    one, two = answers(2)
    with torch.no_grad():
        before, _ = actor.log_probs([one, two], torch.ones(2))
        after, _ = actor.log_probs([one, row(two.prompt_ids, [1, 2, 3])], torch.ones(2))
    torch.testing.assert_close(before[0, :1], after[0, :1], atol=1e-12, rtol=0)
    assert not torch.allclose(before[1, :1], after[1, :1])


def test_adapters_and_checkpointing_share_too(tiny_lm: str) -> None:
    model = load_actor(tiny_lm, lora_rank=2, enable_gradient_checkpointing=True)
    rows = mixed()
    same_both_ways(model, lambda: model.log_probs(rows, torch.ones(len(rows)))[0], within=1e-4)


def test_grouped_heads_and_rotary_positions_share_within_float32(tiny_lm: str) -> None:
    model = load_actor(tiny_lm)
    rows = mixed()
    same_both_ways(model, lambda: model.log_probs(rows, torch.ones(len(rows)))[0], within=1e-4)


def test_the_reference_lies_in_the_same_pack(actor: Actor) -> None:
    rows, reference = mixed(), Reference(actor)
    with torch.no_grad():
        _, _, kl = actor.log_probs_and_kl(rows, torch.ones(len(rows)), reference)
    assert kl.abs().max() < 1e-12


def test_a_row_of_no_answer_is_read_at_its_prompt_s_end(judge: RewardModel) -> None:
    some = answers(2)
    empty = row(some[0].prompt_ids, [])
    with torch.no_grad():
        together, alone = judge.scores([*some, empty]), judge.scores([empty])
        twice = judge.scores([empty, empty])
    torch.testing.assert_close(together[2:], alone, atol=1e-12, rtol=0)
    torch.testing.assert_close(twice, alone.repeat(2), atol=1e-12, rtol=0)


def test_attention_over_a_shared_pack_has_the_gradient_of_finite_differences() -> None:
    torch.manual_seed(0)
    rows = [row(list(range(PAYS_FROM)), [1, 2]), row(list(range(PAYS_FROM)), [3])]
    layout: Layout = pack(rows, share=True).layout
    tokens = PAYS_FROM + 3
    query = torch.randn(tokens, 4, 2, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(tokens, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    angles = torch.randn(tokens, 1, dtype=torch.float64)
    for turn in ((), (angles.cos(), angles.sin())):

        def attend(q: Tensor, k: Tensor, v: Tensor, turn: tuple[Tensor, ...] = turn) -> Tensor:
            return segments(q, k, v, layout, 0.7, *turn)

        assert torch.autograd.gradcheck(attend, (query, key, value), fast_mode=True)
