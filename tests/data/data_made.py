"""Small real tokenizers, two chat templates, and the types of the fixtures."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rein.data.loader import Loaded
from rein.types import Trajectory

WriteParquet = Callable[..., Path]
Load = Callable[..., Loaded[Trajectory]]

SPECIAL = ["<pad>", "<eos>", "<bos>", "<end>"]
CHARACTERS = ["<unk>", *map(chr, range(32, 127)), "\n"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}({{ m.role }}){{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)
# Earlier answers lose what stands before "]", as templates drop the thinking of earlier turns.
FORGETFUL = (
    "{% for m in messages %}({{ m.role }})"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split(']')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)


def characters(
    *, template: str | None = None, adds_bos: bool = False, pad: str = "<pad>"
) -> PreTrainedTokenizerFast:
    """One token a character; id = 4 + place in CHARACTERS."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return _wrapped(backend, template, adds_bos, pad)


def byte_pairs(
    *merges: tuple[str, str], template: str | None = None, adds_bos: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE with these merges, and nothing that keeps words apart."""
    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *signs, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend, template, adds_bos, "<pad>")


def _wrapped(backend: Tokenizer, template: str | None, adds_bos: bool, pad: str) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", bos_token="<bos>", pad_token=pad, unk_token=None
    )
    tokenizer.chat_template = template
    return tokenizer


def text_ids(text: str) -> list[int]:
    """What `characters()` makes of a text without special tokens."""
    return [len(SPECIAL) + CHARACTERS.index(sign) for sign in text]
