"""The tokenizer of a model folder without transformers, whose import takes seconds: for looking at data.

Reads tokenizer.json with the `tokenizers` library; renders the folder's chat template as transformers would.
Training never uses it: transformers may rebuild a tokenizer by its class; ids can then differ in rare texts.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Core

from rein.errors import CheckpointError
from rein.model_files import read_json

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FastTokenizer:
    """Implements protocols.Tokenizer but for saving."""

    def __init__(self, folder: Path) -> None:
        self.backend_tokenizer = Core.from_file(str(folder / "tokenizer.json"))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        config = {
            **read_json(folder / "special_tokens_map.json"),
            **read_json(folder / "tokenizer_config.json"),
        }
        self.special = {name: _text(config[name]) for name in _SPECIAL if config.get(name)}
        self.chat_template = _template(folder, config)
        self.bos_token_id = self._id("bos_token")
        self.eos_token_id = self._id("eos_token")
        pad = self._id("pad_token")
        self.pad_token_id = self.eos_token_id if pad is None else pad

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def get_vocab(self) -> dict[str, int]:
        return dict(self.backend_tokenizer.get_vocab())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Any, *, skip_special_tokens: bool = False) -> str:
        return str(
            self.backend_tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)
        )

    def apply_chat_template(self, messages: Any, **options: Any) -> str | list[int]:
        """The messages as the template writes them, as text or ids; raises whatever the template raises."""
        text = _compiled(str(self.chat_template)).render(
            messages=messages,
            tools=options.get("tools"),
            documents=None,
            add_generation_prompt=options.get("add_generation_prompt", False),
            **self.special,
        )
        return self.encode(text, add_special_tokens=False) if options.get("tokenize", True) else text

    def save_pretrained(self, path: str) -> NoReturn:
        raise NotImplementedError("this tokenizer is for looking at data only")

    def _id(self, name: str) -> int | None:
        token = self.special.get(name)
        found = None if token is None else self.backend_tokenizer.token_to_id(token)
        return None if found is None else int(found)


def open_fast_tokenizer(folder: Path, where: str) -> FastTokenizer | None:
    """The folder's tokenizer; None without a tokenizer.json. Raises CheckpointError for a broken one."""
    if not (folder / "tokenizer.json").exists():
        return None
    try:
        return FastTokenizer(folder)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception for a broken file
        raise CheckpointError(
            f"{where}: {folder / 'tokenizer.json'} cannot be read ({error}); write it anew"
        ) from error


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template


@lru_cache  # compiling takes far longer than rendering a row
def _compiled(template: str) -> Template:
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def tojson(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
