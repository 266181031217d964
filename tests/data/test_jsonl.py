"""JSONL of any origin: read by documented rules, or refused with the line number."""

import json

import pytest

from sparkgpt.data.jsonl import read_documents
from sparkgpt.errors import UserError


def written(tmp_path, content: bytes):
    path = tmp_path / "documents.jsonl"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content, expected",
    [
        (b'{"text": "a"}\n{"text": "b"}\n', [(1, b"a"), (2, b"b")]),
        (b'\xef\xbb\xbf{"text": "a"}\n', [(1, b"a")]),
        (b'{"text": "a"}\r\n{"text": "b"}\r\n', [(1, b"a"), (2, b"b")]),
        (b'{"text": "a"}\n{"text": "b"}', [(1, b"a"), (2, b"b")]),
        (b'\n \t\r\n{"text": "a"}\n\n', [(3, b"a")]),
        (b'{"text": ""}\n', [(1, b"")]),
        (b'{"id": 7, "text": "a", "score": NaN}\n', [(1, b"a")]),
        (b'{"text": "a", "title": "\\ud800"}\n', [(1, b"a")]),
        (b'{"text": "\\ud83d\\ude42\\u0000\\r\\n"}\n', [(1, "🙂\0\r\n".encode())]),
        ('{"text": "a\u2028b\u2029c\x85d"}\n'.encode(), [(1, "a\u2028b\u2029c\x85d".encode())]),
        ('{"text": "Käse 奶酪 \ufeff"}\n'.encode(), [(1, "Käse 奶酪 \ufeff".encode())]),
        (b"", []),
    ],
)
def test_accepted(tmp_path, content, expected):
    assert list(read_documents(written(tmp_path, content))) == expected


@pytest.mark.parametrize(
    "line, words",
    [
        (b'{"text": "\xff"}', r"not UTF-8 \(byte 0xff at position 11\); convert"),
        (b'{"text": "caf\xe9"}', "not UTF-8 .byte 0xe9"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8 .byte 0xed"),
        (b'{"text": "\\ud800 alone"}', r"lone surrogate \\ud800; replace it"),
        (b'{"text": "\\ude42\\ud83d"}', r"lone surrogate \\ude42"),
        (b'{"body": "a"}', 'has no "text"; add it or drop'),
        (b'{"text": null}', '"text" that is null; drop'),
        (b'{"text": ["a"]}', '"text" that is not a string; drop'),
        (b'"a"', "is not an object; write it as"),
        (b"{text: a}", "is not JSON .*; mend or drop"),
        (b"[" * 100_000, "is not JSON .*; mend or drop"),
    ],
)
def test_refused_with_file_line_and_remedy(tmp_path, line, words):
    path = written(tmp_path, b'{"text": "good"}\n\n' + line + b'\n{"text": "good"}\n')
    documents = read_documents(path)
    assert next(documents) == (1, b"good")
    with pytest.raises(UserError, match=words) as caught:
        next(documents)
    assert f"{path}, line 3: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_cut_last_line_is_told_from_bad_json(tmp_path):
    path = written(tmp_path, b'{"text": "a"}\n{"text": "b')
    with pytest.raises(UserError, match="line 2: the line is cut off.*fetch or write"):
        list(read_documents(path))


@pytest.mark.parametrize("name, words", [("missing", "No such file"), (".", "Is a directory")])
def test_unreadable(tmp_path, name, words):
    with pytest.raises(UserError, match=f"cannot read .*{words}"):
        list(read_documents(tmp_path / name))


def test_all_that_python_writes_comes_back(tmp_path):
    texts = ["", "plain", '🙂\u2028\x00"\\', "\x7f\x80\uffff\U0010ffff"]
    lines = [json.dumps({"text": t}, ensure_ascii=a) for t in texts for a in (True, False)]
    path = written(tmp_path, "\n".join(lines).encode())
    assert [d.decode() for _, d in read_documents(path)] == [t for t in texts for _ in range(2)]
