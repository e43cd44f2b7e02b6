"""Claims about tokens, masks and templates."""

from typing import Any

import numpy as np
import pytest
from data_made import CHAT, FORGETFUL, byte_pairs, characters, text_ids

from rein.data.rejects import BadRow
from rein.data.tokenize import Encoder
from rein.errors import ConfigError

USER = [{"role": "user", "content": "1+1="}]
PLAIN = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def encoder(tokenizer: Any, **options: Any) -> Encoder:
    return Encoder(tokenizer, **({"apply_chat_template": None, "stop_ids": {1}} | options))


def test_a_chat_prompt_has_one_bos_and_ends_in_the_generation_marker(chat: Encoder) -> None:
    assert chat.prompt_ids(USER).tolist() == [2, *text_ids("(user)1+1=\n(assistant)")]
    assert chat.prompt_ids("1+1=").tolist() == chat.prompt_ids(USER).tolist()  # text is one user turn


@pytest.mark.parametrize("text", ["1+1=", "<bos>1+1="])
def test_a_raw_prompt_has_exactly_one_bos_where_the_tokenizer_adds_one(text: str) -> None:
    assert encoder(characters(adds_bos=True)).prompt_ids(text).tolist() == [2, *text_ids("1+1=")]
    assert encoder(characters()).prompt_ids("1+1=").tolist() == text_ids("1+1=")


def test_every_use_of_the_template_writes_the_same_single_bos(chat: Encoder) -> None:
    prompt, response, _ = chat.conversation([*USER, {"role": "assistant", "content": "2"}])
    assert prompt.tolist() == chat.prompt_ids(USER).tolist()
    assert [*prompt.tolist(), *response.tolist()].count(2) == 1
    assert response.tolist() == chat.response_ids(USER, "2", True).tolist()


def test_an_eos_that_the_tokenizer_appends_does_not_end_the_prompt() -> None:
    from tokenizers import processors

    tokenizer = characters()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 2), ("<eos>", 1)]
    )
    assert encoder(tokenizer).prompt_ids("1+1=").tolist() == [2, *text_ids("1+1=")]


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_token_is_there_exactly_when_the_response_finished(
    chat: Encoder, raw: Encoder, finished: bool
) -> None:
    end = [1] if finished else []
    assert chat.response_ids(USER, "2", finished).tolist() == [*text_ids("2"), *end]
    assert raw.response_ids("1+1=", "2", finished).tolist() == [*text_ids("2"), *end]


def test_a_template_that_writes_no_end_token_still_gets_one() -> None:
    endless = encoder(characters(template=PLAIN.replace("{{ eos_token }}", "")))
    assert endless.response_ids(USER, "2", True).tolist() == [*text_ids("2"), 1]
    assert endless.conversation([*USER, {"role": "assistant", "content": "2"}])[1].tolist() == [
        *text_ids("2"),
        1,
    ]


def test_the_end_token_is_the_one_the_template_writes() -> None:
    two_ends = encoder(characters(template=CHAT.replace("eos_token", "'<end>'")), stop_ids={1, 3})
    assert two_ends.response_ids(USER, "2", True).tolist() == [*text_ids("2"), 3]
    assert two_ends.end_id == 3


def test_a_merge_across_the_seam_is_never_trained() -> None:
    """BPE would merge ":" and "2" over the seam between marker and answer: both keep their own tokens."""
    seam = encoder(byte_pairs((":", "2"), template=PLAIN))
    merged = seam.tokenizer.encode("a:2", add_special_tokens=False)
    assert len(merged) == 2  # the fault would need this
    prompt, response = seam.prompt_ids(USER), seam.response_ids(USER, "2", True)
    assert seam.tokenizer.decode(prompt.tolist()) == "u:1+1=a:"
    assert seam.tokenizer.decode(response.tolist()) == "2<eos>"
    chatted = seam.conversation([*USER, {"role": "assistant", "content": "2"}])
    assert (chatted[0].tolist(), chatted[1].tolist()) == (prompt.tolist(), response.tolist())
    assert chatted[2].all()


def test_a_raw_response_is_tokenised_apart_from_its_prompt() -> None:
    seam = encoder(byte_pairs(("=", "2")))
    whole = [*seam.prompt_ids("1+1=").tolist(), *seam.response_ids("1+1=", "2", False).tolist()]
    assert seam.tokenizer.decode(whole) == "1+1=2"
    assert len(whole) == 5


def test_every_assistant_turn_is_masked_with_its_end_token_and_nothing_else_is(chat: Encoder) -> None:
    talk = [*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    prompt, response, mask = chat.conversation([*talk, {"role": "assistant", "content": "44"}])
    assert prompt.tolist() == [2, *text_ids("(user)1+1=\n(assistant)")]
    between = "\n(user)2+2=\n(assistant)"
    assert response.tolist() == [*text_ids("2"), 1, *text_ids(between), *text_ids("44"), 1]
    assert mask.tolist() == [True] * 2 + [False] * len(between) + [True] * 3


def test_many_turns_with_a_merge_across_every_seam_keep_their_masks() -> None:
    seam = encoder(byte_pairs((":", "2"), template=PLAIN))
    talk = [*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "4"}]
    _, response, mask = seam.conversation([*talk, {"role": "assistant", "content": "2"}])
    assert seam.tokenizer.decode(response[mask].tolist()) == "2<eos>2<eos>"
    assert seam.tokenizer.decode(response[~mask].tolist()) == "u:4a:"


def test_turns_that_the_template_rewrites_are_not_trained_and_counted() -> None:
    forgetful = encoder(characters(template=FORGETFUL))
    talk = [*USER, {"role": "assistant", "content": "hm]2"}, {"role": "user", "content": "2+2="}]
    prompt, response, mask = forgetful.conversation([*talk, {"role": "assistant", "content": "so]4"}])
    assert forgetful.tokenizer.decode(prompt.tolist()) == "(user)1+1=(assistant)2<eos>(user)2+2=(assistant)"
    assert forgetful.tokenizer.decode(response.tolist()) == "so]4<eos>"
    assert mask.all()
    assert forgetful.untrained_turns.total() == 1


def test_context_is_never_trained(chat: Encoder) -> None:
    talk = [*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2="}]
    prompt, response, mask = chat.conversation([*talk, {"role": "assistant", "content": "4"}], context=3)
    assert prompt.tolist() == chat.prompt_ids(talk).tolist()
    assert response.tolist() == [*text_ids("4"), 1]
    assert mask.all()


def test_what_follows_the_last_answer_is_left_out(chat: Encoder) -> None:
    talk = [*USER, {"role": "assistant", "content": "2"}]
    assert chat.conversation([*talk, {"role": "user", "content": "thanks"}])[1].tolist() == [
        *text_ids("2"),
        1,
    ]


def test_a_text_that_holds_an_end_token_ends_there(chat: Encoder, raw: Encoder) -> None:
    for each in (chat, raw):
        assert each.response_ids("1+1=", "2<eos>3", True).tolist() == [*text_ids("2"), 1]
        assert each.response_ids("1+1=", "2<eos>", False).tolist() == [*text_ids("2"), 1]


def test_decoding_stops_at_the_first_of_several_stop_ids(raw: Encoder) -> None:
    both = encoder(characters(), stop_ids={1, 3})
    assert both.decode_response([*text_ids("ok"), 3, *text_ids("more"), 1]) == "ok"
    assert raw.decode_response([*text_ids("ok"), 3, 1, 0, 0]) == "ok"
    assert raw.decode_response([*text_ids("ok"), 3, 1, 0, 0], keep_special=True) == "ok<end>"


def test_half_an_emoji_decodes_to_valid_text() -> None:
    bytewise = encoder(byte_pairs())
    ids = bytewise.response_ids("", "你好😀", False)
    assert bytewise.decode_response(ids) == "你好😀"
    bytewise.decode_response(ids[:-2]).encode("utf-8")


def test_a_template_that_refuses_names_the_row_as_bad() -> None:
    strict = encoder(characters(template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(BadRow, match="roles must alternate"):
        strict.prompt_ids(USER)


def test_asking_for_a_template_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.apply_chat_template: the tokenizer has no chat template"):
        encoder(characters(), apply_chat_template=True)


def test_raw_text_is_used_although_there_is_a_template_when_asked() -> None:
    forced = encoder(characters(template=CHAT), apply_chat_template=False)
    assert forced.prompt_ids(USER).tolist() == text_ids("1+1=")


def test_the_fingerprint_changes_with_what_decides_ids_and_with_nothing_else() -> None:
    same = encoder(characters(template=CHAT)).fingerprint()
    used = characters(template=CHAT)
    used(["a", "bb"], padding=True, truncation=True, max_length=1)
    assert encoder(used).fingerprint() == same
    others = [
        encoder(characters(template=CHAT + " ")),
        encoder(characters(template=CHAT), apply_chat_template=False),
        encoder(characters(template=CHAT), stop_ids={1, 3}),
        encoder(characters(template=CHAT, adds_bos=True)),
        encoder(byte_pairs(template=CHAT)),
    ]
    assert len({same, *(other.fingerprint() for other in others)}) == 1 + len(others)


def test_ids_are_int64(chat: Encoder) -> None:
    for ids in (chat.prompt_ids(USER), chat.response_ids(USER, "2", True)):
        assert ids.dtype == np.int64
