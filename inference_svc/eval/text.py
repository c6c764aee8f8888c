"""Text to measure on: a local file, its words, its tokens."""

import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference_svc.eval.eval_model import EvalModel
from shared.types.errors import InvalidInputError

SUFFIXES = (".txt", ".txt.gz")
_WORD = re.compile(r"\S+|\n")


class UnusableTextError(InvalidInputError):
    """The text file cannot be read, or does not hold enough."""

    reason = "unusable_text"


@dataclass(frozen=True, slots=True)
class EvalText:
    """Encoded text.

    Attributes:
        token_ids: after the model's begin token, if it has one.
        num_words: blank-separated ones, and one end per line: what WikiText's perplexities count.
    """

    token_ids: tuple[int, ...]
    num_words: int


def load_text(path: Path, model: EvalModel, num_words: int = 0) -> EvalText:
    """Read and encode a file, or its first words.

    Args:
        path: plain text in UTF-8, or the same compressed by gzip.
        model: whose tokenizer encodes it.
        num_words: 0: all.

    Raises:
        UnusableTextError: it is not there, or is no such file.
    """
    text = first_words(read_text(path), num_words)
    tokenizer: Any = model.loaded.tokenizer
    token_ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    begin = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    return EvalText((*begin, *token_ids), count_words(text))


def read_text(path: Path) -> str:
    """Read a file as it is: line ends are not changed.

    Raises:
        UnusableTextError: it is not there, or is no text.
    """
    remedy = "give a file of plain text, .txt or .txt.gz, in UTF-8"
    if not path.name.endswith(SUFFIXES):
        raise UnusableTextError(f"{path} is not named as a text", remedy)
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    except FileNotFoundError as error:
        raise UnusableTextError(f"{path} does not exist", remedy) from error
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or type(error).__name__
        raise UnusableTextError(f"{path} cannot be read ({cause})", remedy) from error


def count_words(text: str) -> int:
    """Count blank-separated words, and one end per line."""
    return len(text.split()) + text.count("\n")


def first_words(text: str, num_words: int) -> str:
    """Cut text after its first words, counted as `count_words` does; 0: all of it."""
    if not num_words:
        return text
    for number, match in enumerate(_WORD.finditer(text), start=1):
        if number == num_words:
            return text[: match.end()]
    return text
