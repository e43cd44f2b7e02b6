"""The contract of both ways of decoding: transformers' own answers, and the training forward's log-probs."""

import numpy as np
import pytest
import torch
from rows_made import prompts, row
from transformers import AutoModelForCausalLM

from rein.engines.hf import HfEngine
from rein.errors import EngineError
from rein.models.actor import Actor, load_actor
from rein.types import Completion

WAY = {"fused": True}
TEXTS = [[3, 4, 13, 5, 15], [7], [3, 3, 3, 3, 3, 3, 3, 9], [5, 6], [12, 11, 10], [8, 8, 8]]


@pytest.fixture(params=[True, False], ids=["fused", "padded"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(WAY, "fused", request.param)
    return "fused" if request.param else "padded"


def engine(actor: Actor, *, stop: list[int] | None = None, **options: object) -> HfEngine:
    return HfEngine(actor.model, actor.tokenizer, [1] if stop is None else stop, **WAY, **options)  # type: ignore[arg-type]


def answers(
    made: HfEngine, *, texts: list[list[int]] = TEXTS, n: int = 1, temperature: float = 1.0,
    top_p: float = 1.0, room: int = 12, seed: int = 0,
) -> list[list[Completion]]:  # fmt: skip
    return made.generate(
        prompts(texts), n=n, temperature=temperature, top_p=top_p, max_new_tokens=room, seed=seed
    )


def ids(found: list[list[Completion]]) -> list[list[list[int]]]:
    return [[completion.response_ids.tolist() for completion in some] for some in found]


@pytest.mark.parametrize("stop", [[1], [4, 9, 14]], ids=["one stop id", "three stop ids"])
def test_greedy_answers_are_those_of_transformers_generate(actor: Actor, stop: list[int], tmp_path) -> None:  # type: ignore[no-untyped-def]
    actor.save(tmp_path / "model")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = answers(engine(actor, stop=stop), temperature=0.0)
    for text, (completion,) in zip(TEXTS, found, strict=True):
        prompt = torch.tensor([text])
        theirs = plain.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12,
            eos_token_id=stop, pad_token_id=0,
        )  # fmt: skip
        assert completion.response_ids.tolist() == theirs[0, len(text) :].tolist()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_log_probs_are_those_of_the_training_forward(actor: Actor, temperature: float, top_p: float) -> None:
    found = answers(engine(actor), n=3, temperature=temperature, top_p=top_p)
    rows = [row(text, c.response_ids.tolist()) for text, some in zip(TEXTS, found, strict=True) for c in some]
    with torch.no_grad():
        trained, _ = actor.log_probs(rows, torch.full((len(rows),), temperature))
    for i, completion in enumerate(c for some in found for c in some):
        mine = torch.from_numpy(completion.log_probs)
        torch.testing.assert_close(mine, trained[i, : len(mine)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_neither_the_batch_size_nor_the_way_changes_an_answer(
    actor: Actor, batch_size: int, temperature: float
) -> None:
    plain = HfEngine(actor.model, actor.tokenizer, [1], batch_size=7, fused=False)
    expected = answers(plain, n=3, temperature=temperature, top_p=0.9)
    found = answers(engine(actor, batch_size=batch_size), n=3, temperature=temperature, top_p=0.9)
    assert ids(found) == ids(expected)
    for some, others in zip(found, expected, strict=True):
        for one, other in zip(some, others, strict=True):
            np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


def test_an_answer_is_drawn_by_its_own_place_alone(actor: Actor) -> None:
    """More prompts after it, more samples beside it or more room change nothing of what it begins with."""
    few = ids(answers(engine(actor), texts=TEXTS[:2], n=2))
    many = ids(answers(engine(actor), n=4, room=20))
    for some, others in zip(few, many, strict=False):
        assert some == [other[: len(one)] for one, other in zip(some, others, strict=False)]


def test_the_same_seed_gives_the_same_answers_and_another_others(actor: Actor) -> None:
    one, same, other = (ids(answers(engine(actor, batch_size=4), n=2, seed=s)) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_batches_of_one_run_do_not_repeat_each_other(actor: Actor) -> None:
    found = ids(answers(engine(actor, batch_size=1), texts=[[3, 4]] * 8))
    assert len({tuple(some[0]) for some in found}) > 4


def test_an_answer_ends_with_the_first_stop_id_or_at_the_limit(actor: Actor) -> None:
    stop = {4, 9, 14}
    found = [c for some in answers(engine(actor, stop=sorted(stop)), n=4) for c in some]
    assert {c.finish_reason for c in found} == {"stop", "length"}
    for completion in found:
        written = completion.response_ids.tolist()
        assert len(completion.log_probs) == len(written)
        assert completion.response_ids.dtype == np.int64
        assert not stop & set(written[:-1])
        if completion.finish_reason == "stop":
            assert written[-1] in stop
        else:
            assert len(written) == 12
            assert written[-1] not in stop


def test_an_answer_ends_with_the_token_that_completes_a_stop_text(actor: Actor) -> None:
    plain = [c for some in answers(engine(actor, stop=[]), temperature=0.0, room=20) for c in some]
    text = actor.tokenizer.decode(plain[0].response_ids[5:7])
    found = [
        c
        for some in answers(engine(actor, stop=[], stop_texts=["never", text]), temperature=0.0, room=20)
        for c in some
    ]
    assert found[0].finish_reason == "stop"
    for stopped, whole in zip(found, plain, strict=True):
        written = actor.tokenizer.decode(stopped.response_ids)
        assert stopped.response_ids.tolist() == whole.response_ids[: len(stopped.response_ids)].tolist()
        assert written.endswith(text) == (stopped.finish_reason == "stop")
        assert written.find(text) in (-1, len(written) - len(text))


def test_samples_of_one_prompt_differ_and_stand_beside_each_other(actor: Actor) -> None:
    """Were prompts mixed up, greedy answers repeated n times would not be those of n = 1."""
    once = ids(answers(engine(actor), temperature=0.0))
    thrice = ids(answers(engine(actor, batch_size=6), n=3, temperature=0.0))
    assert thrice == [[only] * 3 for (only,) in once]
    for some in ids(answers(engine(actor), n=6, temperature=2.0)):
        assert len({tuple(answer) for answer in some}) > 1


def test_each_prompt_is_read_once_for_all_its_samples(actor: Actor, way: str) -> None:
    read = []
    hook = actor.model.model.embed_tokens.register_forward_hook(
        lambda m, given, out: read.append(tuple(given[0].shape))
    )
    try:
        answers(engine(actor, stop=[]), texts=[[3, 4, 5], [6]], n=4, room=3)
    finally:
        hook.remove()
    # A fused model packs prompts without their last tokens, which are the answers' first steps.
    assert read == ([(2,), (8,), (8,), (8,)] if way == "fused" else [(2, 3), (8, 1), (8, 1)])


def test_rows_that_ended_leave_the_batch(actor: Actor, way: str) -> None:
    sizes = []
    hook = actor.model.model.embed_tokens.register_forward_hook(
        lambda m, given, out: sizes.append(len(given[0]))
    )
    try:
        found = answers(engine(actor, stop=[4, 9, 14]), n=4)
    finally:
        hook.remove()
    steps = [len(c.response_ids) for some in found for c in some]
    first = 0 if way == "fused" else 1
    assert sizes[1:] == [sum(length > step for length in steps) for step in range(first, max(steps))]


def test_a_prompt_that_fills_the_context_is_named_and_a_long_one_gets_what_is_left(actor: Actor) -> None:
    with pytest.raises(EngineError, match=r"made prompt 1: prompt of 256 tokens fills .* context of 256"):
        answers(engine(actor), texts=[[3], [3] * 256])
    ((completion,),) = answers(engine(actor, stop=[]), texts=[[3] * 250], room=20)
    assert len(completion.response_ids) == 6
    assert completion.finish_reason == "length"


def test_a_long_prompt_takes_no_room_from_those_beside_it(actor: Actor) -> None:
    (short,), (long,) = answers(engine(actor, stop=[]), texts=[[3], [3] * 250], room=20, temperature=0.0)
    ((alone,),) = answers(engine(actor, stop=[]), texts=[[3]], room=20, temperature=0.0)
    assert (len(short.response_ids), len(long.response_ids)) == (20, 6)
    assert short.response_ids.tolist() == alone.response_ids.tolist()


def test_generating_leaves_the_model_as_it_was(actor: Actor) -> None:
    before = [parameter.clone() for parameter in actor.model.parameters()]
    assert actor.model.training
    answers(engine(actor))
    assert actor.model.training
    assert all(torch.equal(a, b) for a, b in zip(before, actor.model.parameters(), strict=True))
    with pytest.raises(EngineError):
        answers(engine(actor), texts=[[3] * 256])
    assert actor.model.training


def test_a_model_that_recomputes_its_blocks_in_training_generates_the_same(tiny_lm: str) -> None:
    plain = load_actor(tiny_lm)
    saving = load_actor(tiny_lm, enable_gradient_checkpointing=True)
    assert ids(answers(engine(plain), temperature=0.0)) == ids(answers(engine(saving), temperature=0.0))


def test_a_model_with_adapters_answers_with_them(tiny_lm: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    adapted = load_actor(tiny_lm, lora_rank=4)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    adapted.save(tmp_path / "fused")
    fused = load_actor(str(tmp_path / "fused"))
    mine = ids(answers(engine(adapted), temperature=0.0))
    assert mine == ids(answers(engine(fused), temperature=0.0))
    assert mine != ids(answers(engine(load_actor(tiny_lm)), temperature=0.0))


def test_progress_is_told_in_prompts(actor: Actor) -> None:
    told: list[int] = []
    engine(actor, batch_size=4).generate(
        prompts(TEXTS), n=2, temperature=1.0, top_p=1.0, max_new_tokens=2, seed=0, advance=told.append
    )
    assert sum(told) == len(TEXTS)
    assert all(told)


def test_some_prompts_told_of_their_places_get_the_answers_they_get_among_all(actor: Actor) -> None:
    made = engine(actor, batch_size=4)
    whole = ids(answers(made, n=3))
    how = {"n": 3, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 12, "seed": 0}
    for places in ([0, 1], [2, 3, 4], [5], [4, 0]):
        some = prompts([TEXTS[place] for place in places])
        assert ids(made.generate(some, places=places, **how)) == [whole[place] for place in places]  # type: ignore[arg-type]
