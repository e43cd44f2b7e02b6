"""The server engine over real HTTP: answers are those of the model, whatever befalls a request."""

import time
from collections.abc import Iterator

import numpy as np
import pytest
from rows_made import prompts
from serving import Manner, Server, serving

from rein.engines import http_json
from rein.engines.hf import HfEngine
from rein.engines.server import ServerEngine
from rein.errors import ConfigError, EngineError
from rein.models.actor import Actor
from rein.types import Completion

pytestmark = pytest.mark.usefixtures("no_proxy")
TEXTS = [[3, 4, 13, 5, 15], [7], [3, 3, 3, 3, 3, 3, 3, 9], [5, 6], [12, 11, 10], [8, 8, 8]]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_json, "FIRST_WAIT", 0.005)


@pytest.fixture
def one(actor: Actor) -> Iterator[Server]:
    with serving(actor) as server:
        yield server


def engine(server: Server, **options: object) -> ServerEngine:
    actor = server.actor
    given = {"concurrency": 4, "timeout": 30.0, "retries": 4} | options
    stops = given.pop("stops", [1])
    return ServerEngine(
        server.url, actor.tokenizer, stops, vocabulary=actor.vocabulary, context=256, **given  # type: ignore[arg-type]
    )  # fmt: skip


def answers(
    made: ServerEngine | HfEngine, *, texts: list[list[int]] = TEXTS, n: int = 1, temperature: float = 0.0,
    room: int = 12, seed: int = 0, places: list[int] | None = None,
) -> list[list[Completion]]:  # fmt: skip
    return made.generate(
        prompts(texts), n=n, temperature=temperature, top_p=1.0, max_new_tokens=room, seed=seed, places=places
    )


def said(found: list[list[Completion]]) -> list[list[tuple[list[int], str]]]:
    return [[(one.response_ids.tolist(), one.finish_reason) for one in some] for some in found]


def alike(found: list[list[Completion]], expected: list[list[Completion]]) -> None:
    assert said(found) == said(expected)
    for some, others in zip(found, expected, strict=True):
        for mine, other in zip(some, others, strict=True):
            assert mine.response_ids.dtype == np.int64
            assert mine.log_probs.dtype == np.float32
            np.testing.assert_allclose(mine.log_probs, other.log_probs, atol=1e-5)


def own(actor: Actor, stops: list[int] | None = None, texts: list[str] | None = None) -> HfEngine:
    return HfEngine(actor.model, actor.tokenizer, stops or [1], stop_texts=texts or ())


@pytest.mark.parametrize("ids", ["token_ids", "content", "numbered", "texts"])
def test_greedy_answers_are_those_of_the_model_in_every_manner(actor: Actor, ids: str) -> None:
    expected = answers(own(actor, [1, 4, 9]))
    assert {reason for some in said(expected) for _, reason in some} == {"stop", "length"}
    with serving(actor, Manner(ids=ids)) as server:
        alike(answers(engine(server, stops=[1, 4, 9])), expected)


@pytest.mark.parametrize("trims", [False, True], ids=["kept", "trimmed"])
def test_a_stop_text_belongs_to_the_answer_though_the_server_trims_it(actor: Actor, trims: bool) -> None:
    plain = answers(own(actor), room=20)
    # The second one is all of its answer: what trims it has no token left to give.
    texts = [
        "never",
        *(actor.tokenizer.decode(plain[i][0].response_ids[k : k + 2]) for i, k in ((0, 5), (1, 0))),
    ]
    expected = answers(own(actor, texts=texts), room=20)
    assert len(expected[1][0].response_ids) == 2
    with serving(actor, Manner(trims=trims)) as server:
        alike(answers(engine(server, stop_texts=texts), room=20), expected)


def test_samples_have_seeds_of_their_own_which_follow_from_seed_place_and_sample(one: Server) -> None:
    made = engine(one)
    found = answers(made, n=3, temperature=1.0)
    seeds = {(tuple(body["prompt"]), body["seed"]) for body in one.bodies}
    assert len({seed for _, seed in seeds}) == len(TEXTS) * 3
    alike(answers(made, n=3, temperature=1.0), found)
    some = answers(made, texts=TEXTS[2:4], n=2, temperature=1.0, places=[2, 3])
    assert said(some) == [other[:2] for other in said(found)[2:4]]
    assert said(answers(made, n=3, temperature=1.0, seed=1)) != said(found)


def test_requests_ask_for_the_whole_distribution(one: Server) -> None:
    answers(engine(one, key="secret"), texts=TEXTS[:1], temperature=0.7)
    (body,) = one.bodies
    assert one.keys == ["Bearer secret"]
    assert body["prompt"] == TEXTS[0]
    assert (body["temperature"], body["top_p"], body["top_k"], body["min_p"]) == (0.7, 1.0, -1, 0.0)
    assert body["repetition_penalty"] == body["repeat_penalty"] == 1.0
    assert (body["model"], body["n"], body["logprobs"], body["stop_token_ids"]) == ("tiny", 1, 1, [1])


def test_as_many_requests_are_under_way_as_may_be(actor: Actor) -> None:
    with serving(actor, Manner(every=0.02)) as server:
        answers(engine(server, concurrency=5), n=4)
        assert server.most_seen == 5


def test_a_busy_server_gets_fewer_requests_at_once_and_loses_none(actor: Actor) -> None:
    expected = answers(own(actor), n=6)
    with serving(actor, Manner(most=2, every=0.01)) as server:
        made = engine(server, concurrency=16, retries=2)
        alike(answers(made, n=6), expected)
        assert server.refused > 0
        first, refused = server.requests, server.refused
        alike(answers(made, n=6), expected)  # it begins with what was right
        assert server.refused - refused < refused
        assert server.requests - first < first


def test_retry_after_holds_every_request(actor: Actor) -> None:
    with serving(actor, Manner(most=1, after="0.3")) as server:
        answers(engine(server, concurrency=2), texts=TEXTS[:2])
        assert server.refused == 1
        assert server.times[2] - server.times[1] >= 0.29


@pytest.mark.parametrize(
    "manner",
    [
        Manner(refuse={1: (500, "down"), 2: (502, ""), 5: (408, "")}),
        Manner(refuse={0: (503, "Loading model"), 1: (503, "Loading model")}),
        Manner(cuts=(0, 3, 4)),
        Manner(garbles=(2, 3)),
        Manner(slow={1: 2.0}),
    ],
    ids=["5xx", "loading", "cut in the middle", "no JSON", "slow"],
)
def test_what_passes_is_asked_again(actor: Actor, manner: Manner) -> None:
    with serving(actor, manner) as server:
        alike(answers(engine(server, timeout=0.5)), answers(own(actor)))
        assert len(TEXTS) < server.requests < 2 * len(TEXTS) + 1


def test_a_refusal_is_an_error_at_once_in_the_servers_words(actor: Actor) -> None:
    refused = {0: (400, '{"error": {"message": "max_tokens is\\ntoo large", "code": 400}}')}
    with serving(actor, Manner(refuse=refused)) as server:
        with pytest.raises(EngineError, match=r"HTTP 400 \(max_tokens is\\ntoo large\); correct what"):
            answers(engine(server, concurrency=1))
        assert server.requests == 1
    no_key = pytest.raises(EngineError, match=r"HTTP 401 \(no key\); give its key by api_key_env")
    with serving(actor, Manner(refuse={0: (401, "no key")})) as server, no_key:
        answers(engine(server, concurrency=1))


def test_a_dead_server_is_asked_as_often_as_allowed(actor: Actor) -> None:
    with serving(actor, Manner(dies_after=3)) as server:
        made = engine(server, concurrency=1, retries=2)
        with pytest.raises(EngineError, match=r"cannot be asked \(.*\), tried 3 times; start the server"):
            answers(made)
        assert server.requests == 6
    with pytest.raises(EngineError, match="Connection refused"):  # nothing listens there now
        answers(made)


def test_an_error_does_not_wait_for_what_is_under_way(actor: Actor) -> None:
    with serving(actor, Manner(slow={0: 5.0}, refuse={1: (400, "no")})) as server:
        began = time.monotonic()
        with pytest.raises(EngineError, match="HTTP 400"):
            answers(engine(server, concurrency=2))
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("manner", "words"),
    [
        (Manner(no_log_probs=True), "gives no log-probs; its completions must answer `logprobs`"),
        (Manner(short=True), r"gives \d+ log-probs of \d+ tokens"),
        (Manner(keeps_stop=False), "left its last token out"),
        (Manner(own_stops=(4, 9, 14)), "which is no stop id of the model"),
    ],
    ids=["no log-probs", "wrong number", "no stop token", "stops elsewhere"],
)
def test_what_a_server_lacks_is_said(actor: Actor, manner: Manner, words: str) -> None:
    with serving(actor, manner) as server, pytest.raises(EngineError, match=words):
        answers(engine(server), n=4, temperature=1.0, room=40)


def test_token_texts_that_may_be_several_tokens_are_refused(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = type(actor.tokenizer).decode

    def alike_digits(self: object, ids: list[int], **options: object) -> str:
        return str(decode(self, ids, **options)).replace("7", "5")  # type: ignore[arg-type]

    monkeypatch.setattr(type(actor.tokenizer), "decode", alike_digits)
    refused = pytest.raises(EngineError, match=r"token texts without ids, one of them '5', and 2 tokens")
    with serving(actor, Manner(ids="texts")) as server, refused:
        answers(engine(server), n=4, temperature=2.0)


def test_a_prompt_that_fills_the_context_is_refused(one: Server) -> None:
    with pytest.raises(EngineError, match="made prompt 0: prompt of 256 tokens fills the context of 256"):
        answers(engine(one), texts=[[3] * 256])
    (some,) = answers(engine(one, stops=[]), texts=[[3] * 250], room=12)
    assert (len(some[0].response_ids), some[0].finish_reason) == (6, "length")


@pytest.mark.parametrize("url", [None, "localhost:8000"])
def test_a_url_is_needed(actor: Actor, url: str | None) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.server\.url: .*; write the server's"):
        ServerEngine(url, actor.tokenizer, [1], vocabulary=18, context=256)
