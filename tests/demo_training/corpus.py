"""Reads the two text corpora and splits off the parts that are never trained on.

Owns: file formats (WikiText articles, JSON-lines dialogues) and the held-out split. Knows nothing
of tokens. Text is kept exactly as it is stored (`<unk>`, ` @-@ ` and the spaces around punctuation
included), so that training text and evaluation text have had the same treatment: none.

Invariants:
1. The split depends on the data alone (article index, dialogue id), so a resumed run, and the
   evaluation, see the same held-out part.
"""

import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_EVERY = 30
"""One article or dialogue in this many is held out (about 3 %)."""

_ARTICLE_TITLE = re.compile(r"^ = [^=].*[^=] = ?$", re.MULTILINE)


@dataclass(frozen=True)
class Turn:
    """One exchange of a dialogue."""

    user: str
    assistant: str


@dataclass(frozen=True)
class Corpus:
    """Text to train on and text to watch the loss on."""

    articles: list[str]
    dialogues: list[list[Turn]]
    held_out_articles: list[str]
    held_out_dialogues: list[list[Turn]]


def read_text(path: Path) -> str:
    """Read a UTF-8 file, gzip-compressed if its name ends in `.gz`."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return file.read()
    return path.read_text(encoding="utf-8")


def split_articles(text: str) -> list[str]:
    """Cut WikiText at its level-1 headings (` = Title = `); the heading stays with its article."""
    starts = [match.start() for match in _ARTICLE_TITLE.finditer(text)]
    ends = [*starts[1:], len(text)]
    return [text[start:end] for start, end in zip(starts, ends, strict=True)]


def read_dialogues(path: Path) -> dict[str, list[Turn]]:
    """Read `{"task", "id", "history": [{"user", "bot"}, …]}` lines, keyed by `task/id`."""
    dialogues: dict[str, list[Turn]] = {}
    for line in read_text(path).splitlines():
        row = json.loads(line)
        turns = [Turn(str(turn["user"]), str(turn["bot"])) for turn in row["history"]]
        dialogues[f"{row['task']}/{row['id']}"] = turns
    return dialogues


def load_corpus(text_path: Path, conversations_path: Path) -> Corpus:
    """Read both files and split them; every `HELD_OUT_EVERY`-th item is held out."""
    articles = split_articles(read_text(text_path))
    dialogues = read_dialogues(conversations_path)
    held_out_keys = set(sorted(dialogues)[::HELD_OUT_EVERY])
    return Corpus(
        articles=[a for i, a in enumerate(articles) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1],
        dialogues=[turns for key, turns in dialogues.items() if key not in held_out_keys],
        held_out_articles=articles[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY],
        held_out_dialogues=[dialogues[key] for key in sorted(held_out_keys)],
    )


def frequent_words(articles: Sequence[str], min_count: int = 4) -> list[str]:
    """List lower-case words of four to nine letters seen `min_count` times or more, sorted."""
    counts: dict[str, int] = {}
    for article in articles:
        for word in re.findall(r"(?<= )[a-z]{4,9}(?= )", article):
            counts[word] = counts.get(word, 0) + 1
    return sorted(word for word, count in counts.items() if count >= min_count)
