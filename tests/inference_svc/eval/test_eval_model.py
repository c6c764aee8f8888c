"""Words are counted as in WikiText, and files are read unchanged."""

import gzip

import pytest

from inference_svc.eval.eval_model import UnusableTextError, count_words, first_words, read_text

TEXT = " \n = A title = \n \n Some <unk> words .\n"


def test_words_are_separated_by_blanks_and_line_ends():
    """Nine in the first line, four in the second… the blank line has one, too."""
    assert count_words(TEXT) == 8 + 4


@pytest.mark.parametrize("num_words", [1, 2, 5, 7, 11, 12])
def test_a_text_is_cut_after_a_number_of_words(num_words):
    """The beginning of the text, unchanged."""
    cut = first_words(TEXT, num_words)
    assert TEXT.startswith(cut)
    assert count_words(cut) == num_words


def test_a_short_text_is_used_completely():
    """Nothing is cut that is not there."""
    assert first_words(TEXT, 0) == first_words(TEXT, 99) == TEXT


def test_compressed_text_is_the_same_text(tmp_path):
    """Line ends do not change."""
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
def test_invalid_texts_are_refused(tmp_path, name, content):
    """One line with the remedy."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnusableTextError, match=r"\.txt or \.txt\.gz"):
        read_text(path)
