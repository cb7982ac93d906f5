"""Files of rated word pairs, in the formats of public lists, and files that are none."""

import os

import pytest

from tiewise.checkpoint.untrusted import read_bytes
from tiewise.core.errors import CheckpointError, DataError
from tiewise.inspection.tables import rated_pairs
from tiewise.inspection.tables.rated_pairs import RatedPair, read_pairs

CAT, STOCK = RatedPair("tiger", "cat", 7.35), RatedPair("stock", "jaguar", 0.92)


def write(path, content):
    file = path / "pairs.txt"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize(
    "content",
    [
        "tiger\tcat\t7.35\nstock\tjaguar\t0.92\n",
        "Word 1,Word 2,Human (mean)\ntiger,cat,7.35\nstock,jaguar,.92\n",
        '"tiger","cat",7.35\n"stock","jaguar",0.92\n',
        "tiger cat 7.35\nstock   jaguar 0.92",
        "# from a list\n\nword1\tword2\tPOS\tSimLex999\tconc(w1)\ntiger\tcat\tN\t7.35\t5\nstock\tjaguar\tN\t0.92\t1\n",
        "tiger\tcat\tN\t7.35\tSYNONYMS\nstock\tjaguar\tN\t0.92\tNONE\n",
        b"\xef\xbb\xbftiger\tcat\t7.35\r\nstock\tjaguar\t0.92\r\n",
    ],
    ids=["tabs", "commas and header", "quotes", "spaces", "SimLex-999", "SimVerb-3500", "byte order mark"],
)
def test_read_pairs_reads_the_formats_of_public_lists(tmp_path, content):
    assert read_pairs(write(tmp_path, content)) == (CAT, STOCK)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no pairs in it; write lines of: word1 word2 rating"),
        ("tiger cat\nstock jaguar\n", "line 1: no rating after two words"),
        ("a\tb\trating\na\tb\thigh\n", "line 1: no rating after two words"),
        ("a b 1\nc d\n", "line 2: 2 fields, the rating is field 3"),
        ("a b 1\nc d much\n", "line 2: 'much' is no rating"),
        ("a b 1\nc d nan\n", "line 2: 'nan' is no rating"),
        ("a\tb\t1\n\t d\t2\n", "line 2: a word is empty"),
        ("a b 1\nc d 1\n", "all 2 ratings are equal"),
        (b"a b 1\n\xff d 2\n", "not UTF-8 text"),
    ],
)
def test_read_pairs_refuses_other_files_in_one_line(tmp_path, content, message):
    with pytest.raises(DataError) as error:
        read_pairs(write(tmp_path, content))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_read_pairs_refuses_what_is_no_readable_file_as_other_readers_do(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # opening it must not wait for a writer
    (tmp_path / "large.txt").touch()
    os.truncate(tmp_path / "large.txt", rated_pairs.MOST_BYTES + 1)
    for name in ("absent.txt", "", "pipe", "large.txt"):
        messages = []
        for read in (read_pairs, lambda path: read_bytes(path, rated_pairs.MOST_BYTES)):
            with pytest.raises(CheckpointError) as error:
                read(tmp_path / name)
            messages.append(str(error.value))
        assert messages[0] == messages[1]
