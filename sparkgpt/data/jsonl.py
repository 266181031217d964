"""Reads documents, `{"text": "..."}` one per line, from JSONL of any origin.

Accepted:
- a UTF-8 byte order mark at the start of the file, skipped;
- lines that end in LF or CRLF, and a last line without either, if it is complete;
- U+2028, U+2029 and other Unicode line ends inside a line: they are text, only LF ends a line;
- empty lines and lines of ASCII white space, skipped (they still count as lines);
- other keys beside `text`, ignored;
- an empty `text`: an empty document, which fills one position (BOS, whose target is EOS).

Refused, with file, line number and what to do:
- bytes that are not UTF-8 (0xff, UTF-16, compressed files);
- `text` with a lone surrogate such as "\\ud800", which no UTF-8 can hold;
- `text` missing, null or not a string; a line that is no object or no JSON; a cut last line.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import orjson

from sparkgpt.errors import UserError

BOM = b"\xef\xbb\xbf"
REPLACE_BYTES = "convert the file to UTF-8 (`iconv -f ENCODING -t UTF-8`) or drop the line"


def read_documents(path: Path | str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, the document's UTF-8 bytes), one line in memory at a time.

    Raises UserError by the rules above, and when the file can't be read.
    """
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(BOM)
                if line.strip():
                    yield number, parse_line(line, path, number)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def parse_line(line: bytes, path: Path | str, number: int) -> bytes:
    """The document in one line of JSON. `path` and `number` name it in a UserError."""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        value = _parse_slowly(line, path, number)
    if not isinstance(value, dict):
        raise _refused(path, number, "is not an object", 'write it as {"text": "..."}')
    if "text" not in value:
        raise _refused(path, number, 'has no "text"', "add it or drop the line")
    text = value["text"]
    if not isinstance(text, str):
        kind = "null" if text is None else "not a string"
        raise _refused(path, number, f'has a "text" that is {kind}', "drop the line")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        what = f'has a "text" with the lone surrogate \\u{ord(text[error.start]):04x}'
        raise _refused(path, number, what, "replace it with U+FFFD or drop the line") from error


def _parse_slowly(line: bytes, path: Path | str, number: int) -> object:
    """What orjson refuses: NaN or lone surrogates beside `text` are fine, the rest is explained."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1})"
        raise _refused(path, number, what, REPLACE_BYTES) from error
    except (ValueError, RecursionError) as error:
        if line.endswith(b"\n"):
            raise _refused(path, number, f"is not JSON ({error})", "mend or drop it") from error
        what = "is cut off: the file ends inside it"
        raise _refused(path, number, what, "fetch or write the file again") from error


def _refused(path: Path | str, number: int, what: str, remedy: str) -> UserError:
    return UserError(f"{path}, line {number}: the line {what}; {remedy}")
