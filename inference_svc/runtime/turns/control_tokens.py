"""Encodes text of clients so that no part of it becomes a control token.

Control tokens are those that a model takes as structure: the tokenizer's special tokens, and added
tokens that its chat template writes (`<think>`, `<tool_call>`), special or not. A client that could
write one into a message could forge where a message ends, and who speaks next.

Text without such parts is left as it is, and is tokenised together with the template around it, as
the stock `apply_chat_template(tokenize=True)` does: cutting it apart would change its tokens. In
other text each such part is replaced by a mark before the template sees it. The tokenizer is our
own copy, to which the mark was added as a token. After tokenising, each mark is replaced by the
tokens that spell out the part. The parts are found by asking the tokenizer, so that texts which
become control tokens only after its normalisation are found, too.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken

from inference_svc.core.errors import InvalidTurnError
from inference_svc.core.template_arguments import Arguments
from inference_svc.runtime.turns.chat_template import Message

MAX_ROUNDS = 8  # searches between parts already found; no known tokenizer needs three
MAX_SPELLED = 4096  # cached spellings
# Added tokens that are not special count if they look like markup: others are ordinary words.
_MARKUP = re.compile(r"[^\w\s](?:.*\w.*)[^\w\s]", re.DOTALL)
_WITNESS = "x"  # put before a spelling that is tried: a first token may be decoded differently


class ControlTokens:
    """A tokenizer's control tokens, and the encoding that avoids them. One thread at a time.

    Args:
        tokenizer: a copy that belongs to this object: a token is added to it.

    Attributes:
        ids: the ids of all control tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
        self._contents = {token_id: str(token.content) for token_id, token in added.items()}
        special = {token_id for token_id, token in added.items() if token.special}
        special.update(tokenizer.all_special_ids)
        blank = {found for found, content in self._contents.items() if not content.strip()}
        self.ids = frozenset(special - blank - _unknown(tokenizer))
        self._normalize = _normalizer(tokenizer)
        self._heads: set[str] = set()
        self._tails: set[str] = set()
        # A client cannot guess the mark, and no tokenizer or template has a reason to change it.
        self._open = f"\ue000{secrets.randbelow(10**18):018}\ue001"
        self._close = "\ue002"
        self._mark = self._open + self._close
        self._marks = re.compile(f"{self._open}([0-9]+){self._close}")
        self._spell = lru_cache(MAX_SPELLED)(self._find_spelling)
        tokenizer.add_tokens([AddedToken(self._mark, normalized=False)])
        self._mark_id: int = tokenizer.convert_tokens_to_ids(self._mark)
        self._prepare()

    def add_written(self, text: str) -> None:
        """Count added tokens in a text of the model's author as control tokens, if markup-like."""
        found = {
            token_id
            for token_id, content in self._contents.items()
            if content in text and _MARKUP.fullmatch(content)
        }
        if not found <= self.ids:
            self.ids |= found - _unknown(self._tokenizer)
            self._prepare()

    def add_neighbours(self, before: str, after: str) -> None:
        """Record the texts that a template writes around a message's: they may complete a token."""
        for name in self._names:
            for at in range(1, len(name)):
                if before.endswith(name[:at]):
                    self._heads.add(name[at:])
                if after.startswith(name[at:]):
                    self._tails.add(name[:at])

    def num_in(self, text: str) -> int:
        """Count the control tokens in a text of the model's author."""
        return sum(token_id in self.ids for token_id in self.encode(text))

    def guard(self, text: str, marked: list[str]) -> str:
        """Return a client's text with marks in place of parts that would become control tokens.

        Args:
            text: the client's text.
            marked: the parts that marks stand for, by the marks' numbers; extended.

        Raises:
            InvalidTurnError: this tokenizer does not let the parts be found.
        """
        head, tail = self._edges(text)
        before = self._mark_for(text[slice(*head)], marked) if head[0] < head[1] else ""
        after = self._mark_for(text[slice(*tail)], marked) if tail[0] < tail[1] else ""
        middle = self._guarded(text[head[1] : tail[0]], marked, MAX_ROUNDS)
        return text[: head[0]] + before + middle + after + text[tail[1] :]

    def encode(self, text: str, marked: Sequence[str] = ()) -> list[int]:
        """Encode a text, its control tokens included; marks become the parts that they stand for.

        Args:
            text: the text, as a template wrote it.
            marked: the parts that marks stand for, as `guard` returned them.

        Raises:
            InvalidTurnError: the template has broken a mark up, or this tokenizer cannot spell out
                a marked part.
        """
        parts = [marked[int(number)] for number in self._marks.findall(text)] if marked else []
        ids = self._encode(self._marks.sub(self._mark, text) if parts else text)
        if not marked:
            return ids
        if ids.count(self._mark_id) != len(parts) or text.count(self._open) != len(parts):
            raise _unspellable(marked[0])
        spelled = iter([self._spell(part) for part in parts])
        return [
            token_id
            for found in ids
            for token_id in (next(spelled) if found == self._mark_id else (found,))
        ]

    def encode_plain(self, text: str) -> list[int]:
        """Encode a client's text alone, without a control token.

        Raises:
            InvalidTurnError: this tokenizer cannot spell out a part of it.
        """
        marked: list[str] = []
        return self.encode(self.guard(text, marked), marked)

    # ------------------------------------------------------------------------------------ finding

    def _prepare(self) -> None:
        """Index the names of control tokens, and the characters with which they begin."""
        self._names = {self._contents[found] for found in self.ids if self._contents.get(found)}
        self._lengths = sorted({len(name) for name in self._names}, reverse=True)
        firsts = {name[0] for name in self._names}
        folded = {text[0] for text in map(self._normalize, self._names) if text}
        # A tokenizer that puts "▁" before each text has it in every text: it is no sign of a token.
        self._firsts = frozenset(firsts | folded - {"▁", " "})
        self._first = re.compile("|".join(map(re.escape, firsts)) or r"\Z.")

    def _guarded(self, text: str, marked: list[str], rounds: int) -> str:
        """Return a text with marks; each text between two marks is searched again by itself.

        The second search is needed because a tokenizer treats the text behind a mark as the
        beginning of a text.
        """
        if self._firsts.isdisjoint(text) and self._firsts.isdisjoint(self._normalize(text)):
            return text  # the case of nearly all texts; this test is cheap, and never wrong
        spans = self._named_spans(text) or self._folded_spans(text)
        if not spans:
            return text
        if not rounds:
            raise _unspellable(text)
        parts, at = [], 0
        for start, end in spans:
            parts.append(self._guarded(text[at:start], marked, rounds - 1))
            parts.append(self._mark_for(text[start:end], marked))
            at = end
        return "".join(parts) + self._guarded(text[at:], marked, rounds - 1)

    def _named_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of control tokens' names, ascending; of several names the longest."""
        spans, at = [], 0
        for match in self._first.finditer(text):
            start = match.start()
            if start < at:
                continue
            for length in self._lengths:
                name = text[start : start + length]
                if name in self._names:
                    at = start + len(name)
                    spans.append((start, at))
                    break
        return spans

    def _folded_spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans that become control tokens only when normalised; ascending."""
        if self.ids.isdisjoint(self._encode(text)):
            return []
        if not self._tokenizer.is_fast:
            raise _unspellable(text)
        found = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        spans = []
        for token_id, (start, end) in zip(found.input_ids, found.offset_mapping, strict=True):
            if token_id in self.ids:
                part = text[start:end].lstrip()  # some tokens include the blanks beside them
                spans.append((end - len(part), end - len(part) + len(part.rstrip())))
        return spans

    def _edges(self, text: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """Find the edges of a text that become control tokens with the template's text beside them.

        Returns:
            A span at the beginning and one at the end of the text, without blanks around them.
        """
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        heads = [start + len(name) for name in self._heads if text.startswith(name, start)]
        start_tail = max([start, *heads])
        tails = [end - len(name) for name in self._tails if text.endswith(name, start_tail, end)]
        if not (heads or tails):
            return (0, 0), (len(text), len(text))
        return (start, start_tail), (min([end, *tails]), max(end, start_tail))

    def _mark_for(self, part: str, marked: list[str]) -> str:
        marked.append(part)
        return f"{self._open}{len(marked) - 1}{self._close}"

    # ----------------------------------------------------------------------------------- spelling

    def _find_spelling(self, part: str) -> tuple[int, ...]:
        """Return tokens that spell out a text and are no control tokens.

        They spell it exactly if any do; otherwise up to blanks and normalisation.

        Raises:
            InvalidTurnError: there are none.
        """
        before = self._encode(_WITNESS)
        rough: tuple[int, ...] = ()
        accepted = {_without_blanks(_WITNESS + text) for text in (part, self._normalize(part))}
        for ids in self._spellings(part):
            if not ids or not self.ids.isdisjoint(ids):
                continue
            text = self._decode([*before, *ids])
            if text == _WITNESS + part:
                return tuple(ids)
            if not rough and _without_blanks(text) in accepted:
                rough = tuple(ids)
        if not rough:
            raise _unspellable(part)
        return rough

    def _spellings(self, part: str) -> Iterator[list[int]]:
        """Yield encodings of a text: cut in two, so that neither is the token; by characters."""
        for at in range(1, len(part)):
            yield self._encode(part[:at]) + self._encode(part[at:])
        for text in (part, self._normalize(part)):
            yield [token_id for character in text for token_id in self._character_ids(character)]

    def _character_ids(self, character: str) -> list[int]:
        """Return the token of a character, or those of its bytes."""
        names = (character, *(f"<0x{byte:02X}>" for byte in character.encode()))
        ids = [self._tokenizer.convert_tokens_to_ids(name) for name in names]
        unknown = (None, self._tokenizer.unk_token_id)
        if ids[0] not in unknown:
            return ids[:1]
        if not any(found in unknown for found in ids[1:]):
            return ids[1:]
        return self._encode(character)

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return token_ids

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


# ---------------------------------------------------------------------- all texts of a turn


@dataclass(frozen=True)
class Guarded:
    """A turn's texts that are safe to render with the chat template.

    Attributes:
        messages: the messages, as templates take them.
        tools: the tools, as templates take them.
        arguments: all arguments of the template.
        beginning: the beginning of the answer; "": none.
        marked: the parts that marks stand for, by the marks' numbers.
    """

    messages: list[Message]
    tools: list[Message]
    arguments: Arguments
    beginning: str
    marked: list[str]


def guarded(
    control: ControlTokens,
    messages: Sequence[Message],
    tools: Sequence[Message],
    arguments: Arguments,
    beginning: str,
) -> Guarded:
    """Put marks into all texts of a turn but the roles of messages, which the template checks.

    Args:
        control: finds the parts that would become control tokens.
        messages: the messages, as templates take them.
        tools: the tools, as templates take them.
        arguments: all arguments of the template.
        beginning: the beginning of the answer; "": none.

    Raises:
        InvalidTurnError: a part cannot be spelled out, or values are nested too deeply.
    """
    marked: list[str] = []
    try:
        safe_messages: list[Message] = [
            {
                name: value if name == "role" else _guarded_value(control, value, marked)
                for name, value in message.items()
            }
            for message in messages
        ]
        return Guarded(
            safe_messages,
            [_guarded_value(control, tool, marked) for tool in tools],
            _guarded_value(control, arguments, marked),
            control.guard(beginning, marked),
            marked,
        )
    except RecursionError as error:
        raise InvalidTurnError(
            "a tool's schema, or the arguments of a call, are nested too deeply",
            "send less deeply nested ones",
        ) from error


def _guarded_value(control: ControlTokens, value: Any, marked: list[str]) -> Any:
    """Return a JSON value with marks in all its strings, names of members included."""
    if isinstance(value, str):
        return control.guard(value, marked)
    if isinstance(value, Mapping):
        return {
            control.guard(name, marked): _guarded_value(control, found, marked)
            for name, found in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded_value(control, found, marked) for found in value]
    return value


# ------------------------------------------------------------------------------- the tokenizer


def _unknown(tokenizer: Any) -> set[int]:
    """Return the token of unknown characters, unless it has another role: it is no structure."""
    names = ("bos_token_id", "eos_token_id", "sep_token_id", "cls_token_id", "mask_token_id")
    others = {getattr(tokenizer, name, None) for name in names}
    return {tokenizer.unk_token_id} - others


def _normalizer(tokenizer: Any) -> Any:
    """Return a tokenizer's normalisation of texts; `str`, which changes nothing, if it has none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    return str if normalizer is None else normalizer.normalize_str


def _without_blanks(text: str) -> str:
    """Return a text without blanks: some tokenizers drop or add them."""
    return "".join(text.replace("▁", " ").split())


def _unspellable(part: str) -> InvalidTurnError:
    return InvalidTurnError(
        f"the text {part[:40]!r} is a control token of the model, which text cannot contain",
        "write it in another way",
    )
