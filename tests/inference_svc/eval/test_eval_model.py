"""Words are counted as WikiText counts them, files are read as they are."""

import gzip

import pytest

from inference_svc.eval.eval_model import UnusableTextError, count_words, first_words, read_text

TEXT = " \n = A title = \n \n Some <unk> words .\n"


def test_a_word_is_what_stands_between_blanks_and_an_end_of_line():
    """Nine of the first, four of the second... the blank line has one, too."""
    assert count_words(TEXT) == 8 + 4


@pytest.mark.parametrize("num_words", [1, 2, 5, 7, 11, 12])
def test_a_text_is_cut_after_words_as_they_are_counted(num_words):
    """The beginning of the text, unchanged."""
    cut = first_words(TEXT, num_words)
    assert TEXT.startswith(cut)
    assert count_words(cut) == num_words


def test_all_words_of_a_short_text():
    """Nothing is cut that is not there."""
    assert first_words(TEXT, 0) == first_words(TEXT, 99) == TEXT


def test_compressed_text_is_the_same_text(tmp_path):
    """Line ends stay what they are."""
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.gz"
    plain.write_bytes("größer\r\n".encode())
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_text(plain) == read_text(packed) == "größer\r\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b"{}"),
        ("a.txt", b"\xff\xfe"),
        ("a.txt.gz", b"plain"),
        ("b.txt.gz", gzip.compress(b"text", mtime=0)[:-6]),
    ],
)
def test_what_is_no_text_is_refused(tmp_path, name, content):
    """One line, which says what to give instead."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnusableTextError, match=r"\.txt or \.txt\.gz"):
        read_text(path)
