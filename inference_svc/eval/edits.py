"""Edits of a context as agents' harnesses make them, and modes to treat the KV behind. Pure.

Owns the kinds of edits, the modes that are compared, and the random edits of plain text. An edit
replaces spans of a context. The text behind the first span was computed over text that is gone. A
seam is where such a kept run begins.

*Source:* kinds: tool results cleared and conversations compacted by agents' harnesses; healing: the
first tokens of a reused chunk are those worth recomputing (EPIC, Hu et al., 2024).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, NamedTuple, cast

from inference_svc.core.edits import edit_policy
from inference_svc.core.ranges import Range
from shared.measuring.options import names_of
from shared.types.errors import InvalidInputError

Kind = Literal["clear", "replace", "compact", "delete"]
KINDS: dict[Kind, str] = {
    "clear": "one to three spans in the middle are replaced by CLEARED, as tool results are",
    "replace": "a span in the middle is replaced by another text, of another length",
    "compact": "a long span near the beginning is replaced by a summary",
    "delete": "a span in the middle goes, and nothing comes in its place",
}
CLEARED = "[cleared]"
SUMMARY = "Summary of what stood here: "
FIRST_TOKENS = 16  # of a context that no edit changes: its beginning, and the sinks
LEAST_CONTEXT_TOKENS = 128  # so that the shortest span has eight tokens
SUMMARISED = 8  # a summary has every eighth sentence
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class MeasuredMode:
    """How tokens behind an edit are treated: a value of `reuse.edits`, or "naive".

    Attributes:
        name: "exact", "keep", "heal:k" or "naive".
        healed_tokens: number of tokens recomputed behind each seam; None: all.
        moves: whether kept keys are embedded at their new positions.
    """

    name: str
    healed_tokens: int | None
    moves: bool = True


EXACT = MeasuredMode("exact", None)
MODES_HELP = "Of exact, keep, heal:k, naive; exact is always measured."


def modes_of(text: str) -> tuple[MeasuredMode, ...]:
    """Parse "keep,heal:16": each mode once, after "exact", with which the others are compared.

    Raises:
        InvalidInputError: another name is there.
    """
    modes = [_mode_of(part.strip().lower()) for part in text.split(",") if part.strip()]
    return tuple(dict.fromkeys((EXACT, *modes)))


def _mode_of(name: str) -> MeasuredMode:
    if name == "naive":
        return MeasuredMode(name, 0, moves=False)
    try:
        policy = edit_policy(name)
    except ValueError as error:
        raise InvalidInputError(
            f"there is no mode of edits named {name}",
            "give one or more of exact, keep, heal:16, naive",
        ) from error
    return MeasuredMode(name, policy.heal_tokens if policy.keeps else None)


def kinds_of(text: str) -> tuple[Kind, ...]:
    """Parse "clear,delete" as `names_of` does."""
    return tuple(cast("Kind", name) for name in names_of(text, KINDS, "kind of edit"))


class Replacement(NamedTuple):
    """A span of a context, and the tokens that replace it; () if none do."""

    span: Range
    new_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Edit:
    """Spans of one context that are replaced at once.

    Attributes:
        replacements: in order, not touching each other, at least one.
    """

    replacements: tuple[Replacement, ...]

    @property
    def first_token(self) -> int:
        """Position of the first token that changes."""
        return self.replacements[0].span[0]

    def runs(self, num_tokens: int) -> Iterator[tuple[Range, Sequence[int]]]:
        """Yield, for the first `num_tokens`: a run that stays, and the new tokens behind it."""
        start = 0
        for (span_start, span_end), new_ids in self.replacements:
            yield (start, span_start), new_ids
            start = span_end
        yield (start, num_tokens), ()


class Writer(NamedTuple):
    """Encodes text to tokens, and decodes tokens."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def draw_edit(
    kind: Kind, token_ids: Sequence[int], others: Sequence[int], writer: Writer, rng: Random
) -> Edit:
    """Draw an edit of plain text; the last three eighths of the text stay as they are.

    Args:
        kind: the kind of edit.
        token_ids: the context, of at least LEAST_CONTEXT_TOKENS.
        others: other text to take a replacement from, at least as long as the context.
        writer: encodes and decodes with the model's tokenizer.
        rng: the source of randomness.
    """
    unit = len(token_ids) // 16
    match kind:
        case "clear":
            cleared = writer.encode(CLEARED)
            spans = _spans(2 * unit, 10 * unit, rng.randint(1, 3), 2 * unit, rng)
            return Edit(tuple(Replacement(span, cleared) for span in spans))
        case "replace":
            (span,) = _spans(2 * unit, 10 * unit, 1, 2 * unit, rng)
            length = _other_length(span[1] - span[0], rng)
            start = rng.randrange(len(others) - length + 1)
            return Edit((Replacement(span, others[start : start + length]),))
        case "compact":
            span = (max(FIRST_TOKENS, unit // 2), 8 * unit)
            return Edit((Replacement(span, _summary(token_ids[slice(*span)], writer)),))
        case "delete":
            (span,) = _spans(2 * unit, 10 * unit, 1, 4 * unit, rng)
            return Edit((Replacement(span, ()),))


def _spans(start: int, end: int, number: int, longest: int, rng: Random) -> list[Range]:
    """Draw spans that do not touch, each from half the longest length to the longest."""
    part = (end - start) // number
    found = []
    for first in range(start, start + part * number, part):
        length = rng.randint(longest // 2, min(longest, part - 1))
        begin = first + rng.randrange(part - length)
        found.append((begin, begin + length))
    return found


def _other_length(length: int, rng: Random) -> int:
    """Draw a length from half to one and a half times another one, and different from it."""
    return rng.choice([each for each in range(length // 2, length * 3 // 2) if each != length])


def _summary(token_ids: Sequence[int], writer: Writer) -> list[int]:
    """Return a few of a text's sentences, at most a quarter of its tokens."""
    sentences = _SENTENCE_END.split(writer.decode(token_ids).strip())
    return writer.encode(SUMMARY + " ".join(sentences[::SUMMARISED]))[: len(token_ids) // 4]
