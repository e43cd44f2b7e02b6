"""Every engine of the table gives the answers of transformers' greedy decoding, and ends them alike."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rows_made import prompts, row
from serving import serving
from transformers import AutoModelForCausalLM

from rein.config.recipe import Recipe
from rein.errors import EngineError
from rein.models.actor import Actor, load_actor
from rein.models.tiny import make_tiny
from rein.protocols import RolloutEngine
from rein.stages.engines import ENGINES, engine_of
from rein.types import Completion

TEXTS = [[3, 4, 13, 5, 15], [7], [3, 3, 3, 3, 3, 3, 3, 9], [5, 6], [12, 11, 10], [8, 8, 8]]
NEAR = 1e-3  # nats between log-probs of engines in fp32


@contextmanager
def nothing(actor: Actor) -> Iterator[dict[str, Any]]:
    """The engine needs no more than the actor."""
    yield {}


@contextmanager
def over_http(actor: Actor) -> Iterator[dict[str, Any]]:
    with serving(actor) as server:
        yield {"server": {"url": server.url, "concurrency": 4}}


@contextmanager
def vllm(actor: Actor) -> Iterator[dict[str, Any]]:
    python = os.environ.get("REIN_VLLM_PYTHON")
    if not python:
        pytest.skip("vllm is in an environment of its own; name its interpreter in REIN_VLLM_PYTHON")
    yield {"vllm": {"python": python, "dtype": "float32", "enforce_eager": True, "max_model_len": 256}}


STARTED: dict[str, Callable[[Actor], AbstractContextManager[dict[str, Any]]]] = {
    "hf": nothing,
    "server": over_http,
    "vllm": vllm,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Actor:
    """Saved with larger weights, so that answers differ and end at different lengths."""
    folder = tmp_path_factory.mktemp("policies")
    made = load_actor(str(make_tiny(folder / "tiny", seed=0, hidden=128, layers=2)))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.125, generator=generator)
    made.path = str(folder / "large")
    made.save(Path(made.path))
    return made


@pytest.fixture(scope="module", params=list(ENGINES))
def settings(request: pytest.FixtureRequest, policy: Actor) -> Iterator[dict[str, Any]]:
    """Of recipe.rollout, for one engine."""
    assert request.param in STARTED, f"say here how the engine {request.param} is started"
    with pytest.MonkeyPatch.context() as patch, STARTED[request.param](policy) as given:
        patch.setenv("no_proxy", "127.0.0.1")
        yield {"engine": request.param} | given


def made(
    settings: dict[str, Any], policy: Actor, stops: list[int], texts: list[str] | None = None
) -> RolloutEngine:
    policy.stop_ids = tuple(stops)  # type: ignore[assignment]
    given = {"model": {"path": policy.path}, "rollout": settings | {"stop": texts or []}}
    return engine_of(Recipe.model_validate(given), policy)


def answers(
    engine: RolloutEngine, *, temperature: float = 0.0, top_p: float = 1.0, n: int = 1, room: int = 12,
    seed: int = 0, advance: Callable[[int], None] | None = None,
) -> list[list[Completion]]:  # fmt: skip
    return engine.generate(
        prompts(TEXTS),
        n=n,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=room,
        seed=seed,
        advance=advance,
    )


def plain(policy: Actor, stops: list[int], room: int = 12) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(policy.path)
    found = []
    for text in TEXTS:
        prompt = torch.tensor([text])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=room,
            eos_token_id=stops, pad_token_id=0,
        )  # fmt: skip
        found.append(whole[0, len(text) :].tolist())
    return found


def ids(found: list[list[Completion]]) -> list[list[list[int]]]:
    return [[one.response_ids.tolist() for one in some] for some in found]


@pytest.mark.parametrize("stops", [[1], [1, 4, 9]], ids=["one stop id", "three stop ids"])
def test_greedy_answers_are_those_of_transformers(
    settings: dict[str, Any], policy: Actor, stops: list[int]
) -> None:
    steps: list[int] = []
    found = answers(made(settings, policy, stops), advance=steps.append)
    assert ids(found) == [[expected] for expected in plain(policy, stops)]
    assert sum(steps) == len(TEXTS)
    ends = {one.finish_reason for some in found for one in some}
    assert ends == ({"stop", "length"} if len(stops) > 1 else ends)
    for (one,) in found:
        written = one.response_ids.tolist()
        assert one.finish_reason == ("stop" if written[-1] in stops else "length")
        assert one.finish_reason == "stop" or len(written) == 12
        assert not set(stops) & set(written[:-1])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probs_are_those_of_the_training_forward(
    settings: dict[str, Any], policy: Actor, temperature: float
) -> None:
    """At the sampling temperature, before top_p cuts; the rollout stage mends what a real server states."""
    found = answers(made(settings, policy, [1]), n=3, temperature=temperature, top_p=0.9)
    rows = [row(text, c.response_ids.tolist()) for text, some in zip(TEXTS, found, strict=True) for c in some]
    with torch.no_grad():
        trained, _ = policy.log_probs(rows, torch.full((len(rows),), temperature))
    for i, one in enumerate(c for some in found for c in some):
        assert one.log_probs.dtype == np.float32
        mine = torch.from_numpy(one.log_probs)
        torch.testing.assert_close(mine, trained[i, : len(mine)], atol=NEAR, rtol=0)


def test_the_token_that_completes_a_stop_text_is_the_last(settings: dict[str, Any], policy: Actor) -> None:
    whole = ids(answers(made(settings, policy, [1]), room=20))
    text = policy.tokenizer.decode(whole[0][0][5:7])
    found = answers(made(settings, policy, [1], ["never", text]), room=20)
    assert found[0][0].finish_reason == "stop"
    for (stopped,), (before,) in zip(found, whole, strict=True):
        written = stopped.response_ids.tolist()
        assert written == before[: len(written)]
        said = policy.tokenizer.decode(written)
        assert said.find(text) in (-1, len(said) - len(text))
        ended = said.endswith(text) or written[-1] == 1
        assert stopped.finish_reason == ("stop" if ended else "length")


def test_samples_differ_and_a_seed_repeats_them(settings: dict[str, Any], policy: Actor) -> None:
    engine = made(settings, policy, [1])
    first = ids(answers(engine, n=4, temperature=1.5))
    assert all(len({tuple(answer) for answer in some}) > 1 for some in first)
    assert ids(answers(engine, n=4, temperature=1.5)) == first
    assert ids(answers(engine, n=4, temperature=1.5, seed=1)) != first


def test_what_fills_the_context_is_refused_and_near_it_cut(settings: dict[str, Any], policy: Actor) -> None:
    engine = made(settings, policy, [1])
    given = {"n": 1, "temperature": 0.0, "top_p": 1.0, "max_new_tokens": 12, "seed": 0}
    with pytest.raises(EngineError, match="made prompt 0: prompt of 256 tokens fills the"):
        engine.generate(prompts([[3] * 256]), **given)  # type: ignore[arg-type]
    ((one,),) = engine.generate(prompts([[3] * 251]), **given)  # type: ignore[arg-type]
    assert len(one.response_ids) <= 5
