"""JSON lines and JSON lists in, values with their place out, one at a time. Knows nothing of columns."""

import json
from collections.abc import Iterator, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import IO, Any
from uuid import UUID

from rein.data.files import Source, first_line
from rein.errors import DataError

BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 16


def json_values(source: Source) -> Iterator[tuple[str, Any]]:
    """The values of a file: its list's elements, or its lines; a line that is no JSON comes as an exception.

    Raises DataError where a list breaks off, since what follows cannot be found again.
    """
    try:
        with source.path.open("rb") as file:
            start = file.read(4096).removeprefix(BOM).lstrip()[:1]
            file.seek(0)
            yield from _elements(source) if start == b"[" else _lines(source, file)
    except OSError as error:
        raise DataError(f"{source.name}: cannot be read ({error.strerror}); check the disk") from error


def _lines(source: Source, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    row = 0
    for number, line in enumerate(file, 1):
        text = line.removeprefix(BOM).strip()
        if not text:
            continue
        try:
            yield f"{source.name} row {row}", json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            yield f"{source.name} line {number}", error
        row += 1


def _elements(source: Source) -> Iterator[tuple[str, Any]]:
    """Decoded one at a time, so that the list never lies in memory as a whole.

    The chunk read doubles while an element does not fit, so even a huge one is parsed in linear time.
    """
    decoder, buffer, at, row, opened = json.JSONDecoder(), "", 0, 0, False
    with source.path.open(encoding="utf-8-sig") as file:
        try:
            while chunk := file.read(max(CHUNK, len(buffer) - at)):
                buffer, at = buffer[at:] + chunk, 0
                while True:
                    at = _skip(buffer, at, " \t\r\n," if opened else " \t\r\n")
                    if not opened and at < len(buffer):
                        at, opened = at + 1, True
                        continue
                    if at >= len(buffer) or buffer[at] == "]":
                        break
                    try:
                        value, at = decoder.raw_decode(buffer, at)
                    except json.JSONDecodeError:
                        break  # the element may go on in the next chunk
                    yield f"{source.name} row {row}", value
                    row += 1
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{source.name} row {row}: not JSON ({first_line(error)}); mend the file"
            ) from error
    if buffer[at:].strip() != "]":
        raise DataError(
            f"{source.name} row {row}: the JSON list breaks off or is not JSON here; mend the file"
        )


def _skip(text: str, at: int, signs: str) -> int:
    while at < len(text) and text[at] in signs:
        at += 1
    return at


def json_form(value: Any) -> Any:
    """What JSON can hold in place of a value that it cannot: `default` of json.dumps."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, date | time | timedelta | Decimal | UUID):
        return str(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form")
