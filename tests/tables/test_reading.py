"""Tables from files: what is read, every fault in one sentence, and bounded memory."""

from __future__ import annotations

import builtins
import csv
import io
import tracemalloc

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbilevel.tables.reading import DELIMITERS, open_table

WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=8)


@pytest.fixture
def file(tmp_path):
    def write(content, name="site.csv"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def cells(table, **options):
    frames = list(table.chunks(**options))
    return pd.concat(frames) if frames else pd.DataFrame(columns=list(table.columns))


@pytest.mark.parametrize(
    ("content", "columns", "rows"),
    [
        (b"age,job\n31,cook\n40,judge\n", ["age", "job"], [["31", "cook"], ["40", "judge"]]),
        (b"age;job\r\n3,5;cook\r\n", ["age", "job"], [["3,5", "cook"]]),
        (b"age\tjob\r31\tcook", ["age", "job"], [["31", "cook"]]),
        (b"a|b\n1|x, y\n", ["a", "b"], [["1", "x, y"]]),
        (b"\xef\xbb\xbfage,job\n1,caf\xc3\xa9\n", ["age", "job"], [["1", "café"]]),
        (b"age,job\n1,caf\xe9 \x96 bar\n", ["age", "job"], [["1", "café – bar"]]),
        (b'a,b\n1,"x, ""y""\nz"\n', ["a", "b"], [["1", 'x, "y"\nz']]),
        (b'a, b\n 1 , "x, y"\n', ["a", "b"], [["1", "x, y"]]),
        (b"\n\na,b\n\n1,2\n\n", ["a", "b"], [["1", "2"]]),
        (b",a\n0,1\n", ["column_1", "a"], [["0", "1"]]),
        (b"only\n1\n2\n", ["only"], [["1"], ["2"]]),
        (b"a,b\n", ["a", "b"], []),
    ],
    ids=["comma", "semicolon", "tab and CR", "bar", "BOM", "Latin-1", "quotes", "blanks", "blank lines", "no name",
         "one column", "no rows"],
)  # fmt: skip
def test_what_is_read(content, columns, rows, file):
    table = open_table(file(content))
    assert list(table.columns) == columns
    assert cells(table).to_numpy().tolist() == rows


def test_lines_are_told_where_records_begin(file):
    table = open_table(file(b'a,b\n1,"x\ny"\n\n2,z\n'))
    assert cells(table).index.tolist() == [2, 5]
    assert cells(table).index.name == "line"


def test_columns_and_chunks_can_be_chosen(file):
    table = open_table(file(b"a,b,c\n" + b"".join(b"%d,x,y\n" % i for i in range(10))))
    frames = list(table.chunks(["c", "a"], rows=4))
    assert [len(frame) for frame in frames] == [4, 4, 2]
    assert list(frames[0].columns) == ["c", "a"]
    assert pd.concat(frames)["a"].tolist() == [str(i) for i in range(10)]


def test_wide_rows_make_short_chunks(file):
    table = open_table(file(b"a\n" + (b"x" * 100_000 + b"\n") * 100))
    assert max(len(frame) for frame in table.chunks()) < 60
    assert len(cells(table)) == 100


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"\xef\xbb\xbf", ["is empty"]),
        (b" \n\n ", ["is empty"]),
        (b"a,b\n1,2\n3\n", ["line 3", "1 field(s)", "2 column(s)"]),
        (b"a,b\n1,2,3\n", ["line 2", "3 field(s)", "quotes"]),
        (b"a,b\n1,2\n\x00\x01\n", ["line 3", "NUL byte"]),
        (b"a,b\n1,\x02\n", ["line 2", "0x02", "no text file"]),
        (b"\x7fELF\x02\x01\x01" + bytes(range(256)), ["no text file"]),
        (b"a,b\n1,\x81\xff\n", ["line 2", "neither UTF-8 nor Latin-1"]),
        (b"\xff\xfea\x00,\x00b\x00", ["UTF-16", "save it as UTF-8"]),
        (b"\x1f\x8b\x08rest", ["gzip"]),
        (b"PK\x03\x04rest", ["Excel"]),
        (b"a,b,a\n1,2,3\n", ["two columns named 'a'", "1. and the 3."]),
        (b'a,b\n"1,2\n3,4\n', ["line 2", "never closed"]),
        (b'a,b\n"1"x,2\n', ["line 2", "closing quote"]),
        (b"a,b\n1,2\n3," + b"x" * 10_000_000 + b"\n", ["line 3", "column 2", "131,072"]),
        (b'a,b\n"' + b"xxxxxxxxx\n" * 1_000_000, ["line 2", "column 1", "131,072", "quote"]),
        (b"a,b\n" + b'"xxxxxxxxxxxxxx\n",' * 500_000, ["line 2", "1,048,576"]),
        (b"PAR1 but nothing else", ["damaged or no Parquet"]),
    ],
    ids=["empty", "only BOM", "blank", "short row", "long row", "NUL", "control", "binary", "undefined", "UTF-16", "gzip",
         "zip", "duplicate", "open quote", "text after quote", "10 MB field", "10 MB quoted", "endless record", "Parquet"],
)  # fmt: skip
def test_faults_are_one_sentence(content, words, file):
    path = file(content)
    tracemalloc.start()
    with pytest.raises(ValueError) as caught:
        cells(open_table(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(word in str(caught.value) for word in [str(path), *words]), caught.value
    assert "\n" not in str(caught.value)
    assert peak < 32e6


def test_faults_of_the_call(file, tmp_path):
    for path, words in ((tmp_path / "none.csv", "There is no file"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=words):
            open_table(path)
    path = file(b"age,job\n1,cook\n")
    with pytest.raises(ValueError, match=r"cut at ';'.*'age,job' is one column.*','"):
        open_table(path, delimiter=";")
    with pytest.raises(ValueError, match="one character"):
        open_table(path, delimiter=";;")
    with pytest.raises(ValueError, match="encoding 'ebcdic' is unknown"):
        open_table(path, encoding="ebcdic")
    with pytest.raises(ValueError, match=r"no column 'jobs'; did you mean 'job'"):
        open_table(path).chunks(["jobs"])
    with pytest.raises(ValueError, match=r"one column only, 'a:b'.*--delimiter"):
        open_table(file(b"a:b\n1:2\n")).check_columns(["a"])
    assert open_table(file(b"a:b\n1:2\n"), delimiter=":").columns == ("a", "b")
    with pytest.raises(ValueError, match="not valid UTF-8"):
        open_table(file(b"a,b\n\xe9,1\n"), encoding="utf-8")
    assert open_table(file(b"a,b\n\xc3\xa9,1\n"), encoding="latin-1").encoding == "latin-1"


def test_parquet(tmp_path):
    path = tmp_path / "site.parquet"
    columns = {
        "whole": pa.array([1, None, 3]),
        "number": pa.array([0.5, 1.5, None]),
        "word": pa.array(["a ", None, "b"]),
        "coded": pa.array(["x", "y", "x"]).dictionary_encode(),
        "truth": pa.array([True, None, False]),
        "day": pa.array([0, 1, None], pa.date32()),
        "nothing": pa.nulls(3),
        "pair": pa.array([[1], [2], None]),
    }
    pq.write_table(pa.table(columns), path)
    table = open_table(path)
    assert (table.kind, table.columns, table.unread) == ("parquet", tuple(columns), {"pair": "list<element: int64>"})
    found = cells(table, rows=2)
    assert found.index.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found["whole"], [1, np.nan, 3])
    np.testing.assert_array_equal(found["number"], [0.5, 1.5, np.nan])
    texts = found[["word", "coded", "truth", "day", "nothing", "pair"]].to_dict("list")
    assert texts == {
        "word": ["a", None, "b"],
        "coded": ["x", "y", "x"],
        "truth": [True, None, False],
        "day": ["1970-01-01", "1970-01-02", None],
        "nothing": [None] * 3,
        "pair": [None] * 3,
    }


def test_parquet_faults(tmp_path, monkeypatch):
    path = tmp_path / "site.parquet"
    path.write_bytes(b"a,b\n1,2\n")
    with pytest.raises(ValueError, match="named like a Parquet file"):
        open_table(path)
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    with pytest.raises(ValueError, match="two columns named 'a'"):
        open_table(path)
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pyarrow is not installed: pip install pyarrow"):
        open_table(path)


def test_memory_does_not_grow_with_the_file(file):
    peaks = []
    for rows in (5000, 20_000):
        table = open_table(file(b"a,b,c\n" + b"1234,some text,9.5\n" * rows))
        tracemalloc.start()
        assert sum(len(frame) for frame in table.chunks(rows=1000)) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


@given(
    st.lists(WORDS.map(str.strip).filter(bool), min_size=2, max_size=4, unique=True).flatmap(
        lambda head: st.tuples(
            st.just(head), st.lists(st.lists(WORDS, min_size=len(head), max_size=len(head)), max_size=5)
        )
    ),
    st.sampled_from(DELIMITERS),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_what_is_written_is_read(tmp_path_factory, table, delimiter, ending, quoted):
    head, rows = table
    text = io.StringIO()
    quoting = csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL
    csv.writer(text, delimiter=delimiter, lineterminator=ending, quoting=quoting).writerows([head, *rows])
    path = tmp_path_factory.mktemp("written") / "site.csv"
    path.write_bytes(text.getvalue().encode())
    found = open_table(path, delimiter=delimiter)
    # A word that begins with a blank and a quote is written without quotes, and read as a quoted one.
    if quoted or not any('"' in word for row in [head, *rows] for word in row):
        assert list(found.columns) == head
        assert cells(found).to_numpy().tolist() == [[word.strip() for word in row] for row in rows]


def table_or_sentence(path, **options):
    sentence = "."
    try:
        return cells(open_table(path, **options))
    except ValueError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 2000
    return None


@settings(max_examples=150)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.text(',;\t|"\n\r ab1é\x00\x85\u2028', max_size=120).map(str.encode),
        st.lists(st.sampled_from([b"a,b\n", b"1,2\n", b'"', b",", b"\n", b"\xff", b"\x00", b"\xef\xbb\xbf", b";", b"\r"]))
        .map(b"".join),
    ),
    st.sampled_from([None, ",", ";", "\t", " "]),
    st.sampled_from([None, "utf-8", "latin-1", "windows-1252"]),
)  # fmt: skip
def test_any_bytes_give_a_table_or_a_sentence(tmp_path_factory, content, delimiter, encoding):
    path = tmp_path_factory.mktemp("bytes") / "site.csv"
    path.write_bytes(content)
    found = table_or_sentence(path, delimiter=delimiter, encoding=encoding)
    if found is not None:
        assert all(isinstance(cell, str) for cell in found.to_numpy().ravel())


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(4, 10**6), st.integers(0, 255)), max_size=4), st.integers(0, 200))
def test_damaged_parquet_gives_a_table_or_a_sentence(tmp_path_factory, changes, cut):
    memory = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2, 3], "b": ["x", "y", None]}), memory)
    content = bytearray(memory.getvalue())
    for place, value in changes:
        content[4 + place % (len(content) - 4)] = value
    path = tmp_path_factory.mktemp("damaged") / "site.parquet"
    path.write_bytes(content[: len(content) - cut])
    table_or_sentence(path)
