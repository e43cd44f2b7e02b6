"""What decides token ids, as short hashes: noted in files and manifests, compared where they are read again.

Ids of another tokenizer mean other tokens: refused. Another template or other stop ids leave stored ids as
they are, but prompts and answers made now differ from those: said. Knows no stage.
"""

import json
from collections.abc import Mapping
from typing import Final

from rein.data.files import Files, sources
from rein.data.parquet import metadata_of
from rein.data.tokenize import Encoder
from rein.errors import DataError

KEY: Final = "rein.tokens"  # in the metadata of a Parquet file: JSON of Encoder.marks()
_SAID: Final = {
    "chat_template": "another chat template (or data.apply_chat_template)",
    "stop_ids": "other stop ids",
}


def noted(encoder: Encoder) -> dict[str, str]:
    """What a file of this encoder's ids says in its metadata."""
    return {KEY: json.dumps(encoder.marks())}


def check_files(files: Files, encoder: Encoder, model: str) -> list[str]:
    """Lines about files whose ids were written in another way than `model`'s encoder would write them.

    Raises DataError for another tokenizer.
    """
    lines = []
    for source in sources(files):
        try:
            marks = json.loads(metadata_of(source).get(KEY, "{}"))
        except ValueError:
            continue  # a damaged note says nothing
        if isinstance(marks, dict):
            lines += differences(
                marks, encoder, source.name, f"than {model} has; use the model that wrote it"
            )
    return lines


def differences(marks: Mapping[str, str], encoder: Encoder, where: str, rest: str) -> list[str]:
    """What differs between the marks and the encoder, a line each. Raises DataError for another tokenizer."""
    now = encoder.marks()
    if marks.get("tokenizer", now["tokenizer"]) != now["tokenizer"]:
        raise DataError(f"{where}: made with another tokenizer {rest}, or make it again with this one")
    return [
        f"{where}: made with {said} {rest}, or make it again if this one is meant"
        for name, said in _SAID.items()
        if marks.get(name, now[name]) != now[name]
    ]
