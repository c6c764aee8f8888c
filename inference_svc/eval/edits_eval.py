"""Part `edits`: quality when KV is kept across an edit of a context.

A context is computed once, edited, and continued by every mode. Mode "exact" computes all tokens
behind the edit again; the other modes are compared with it, edit by edit:

- text: pieces of a text are edited (`edits.py`), and the tokens of the text behind the piece are
  judged. They are new to every mode, like the next message of a conversation.
- records: conversations are edited (`record_edits.py`), and questions are asked.

No edit changes the last token of a context, which is computed together with the tokens behind it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from inference_svc.eval.edits import EXACT, Edit, Kind, MeasuredMode, Writer, draw_edit
from inference_svc.eval.eval_model import (
    EvalModel,
    EvalText,
    UnusableTextError,
    encode_text,
    read_conversations,
    read_text,
)
from inference_svc.eval.figures import EditQuality, EditsReport
from inference_svc.eval.options import EditsOptions
from inference_svc.eval.perplexity import perplexity_of, ratio_of
from inference_svc.eval.record_edits import EditQuestions, converse, edit_records
from inference_svc.eval.retrieval import RecordText, check_answer
from inference_svc.eval.sequence import Sequence as Context
from shared.measuring.statistics import mean, share
from shared.types.errors import InvalidInputError

DEMO = Path(__file__).parents[1] / "demo" / "data" / "conversations.json"
ROOM = 64  # tokens for a question and its answer, or for a replacement longer than its span
ALL = "all"  # stands for all kinds together


@dataclass
class Found:
    """The results of one mode so far, for edits of one kind; a list entry for each edit."""

    kind: str
    mode: str
    reused: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # [next tokens] of each, in nats
    divergences: list[float] = field(default_factory=list)  # nats a token
    agreed: list[int] = field(default_factory=list)  # next tokens
    kept: list[bool] = field(default_factory=list)
    brought: list[bool] = field(default_factory=list)
    stale: list[bool] = field(default_factory=list)
    old_value: list[float] = field(default_factory=list)  # nats, its log-probability

    def add(self, other: "Found") -> None:
        """Append the results of another kind."""
        for each in fields(self)[2:]:
            getattr(self, each.name).extend(getattr(other, each.name))


class EditsEval:
    """Edits one context after the other; `report` returns the results so far."""

    def __init__(self, model: EvalModel, options: EditsOptions) -> None:
        """Read the text.

        Raises:
            UnusableTextError: it cannot be read, or is too short.
            InvalidInputError: the window does not hold a context and the tokens behind it.
        """
        self._model = model
        self._options = options
        self._name, self._text = _load(options, model)
        _check(options, self._text, model)
        tokenizer: Any = model.loaded.tokenizer
        self._writer = Writer(model.text.control.encode_plain, tokenizer.decode)
        self._records = RecordText(model.text, tokenizer.bos_token_id)
        self._found: dict[tuple[str, MeasuredMode], Found] = {
            (kind, mode): Found(kind, mode.name) for kind in options.kinds for mode in options.modes
        }

    def run(self, index: int) -> None:
        """Edit a piece of the text and a conversation by every kind, and judge every mode."""
        self._resume(index)
        self._ask(f"{self._options.seed}/{index}")

    def report(self) -> EditsReport:
        """Return the results so far."""
        options = self._options
        together = {mode: Found(ALL, mode.name) for mode in options.modes}
        for (_, mode), found in self._found.items():
            together[mode].add(found)
        rows = {**self._found, **{(ALL, mode): found for mode, found in together.items()}}
        num_contexts = len(self._found[options.kinds[0], EXACT].losses)
        return EditsReport(
            text=self._name,
            num_contexts=num_contexts,
            context_tokens=options.context_tokens,
            is_overlapping=self._stride < self._piece_tokens,
            num_tokens=num_contexts * options.next_tokens,
            token_bytes=self._model.calibrations["decoupled"].layout.token_bytes,
            seed=options.seed,
            rows=tuple(
                _figures(found, rows[kind, EXACT], self._text) for (kind, _), found in rows.items()
            ),
        )

    @property
    def _piece_tokens(self) -> int:
        """Number of text tokens for one context, with those that are judged."""
        return self._options.context_tokens - 1 + self._options.next_tokens

    @property
    def _stride(self) -> int:
        """Number of tokens between the beginnings of two pieces, as many as the text allows."""
        room = len(self._text.token_ids) - 1 - self._piece_tokens
        return min(self._piece_tokens, max(1, room // self._options.num_contexts))

    def _resume(self, index: int) -> None:
        """Edit one piece of the text, and predict the text behind it."""
        text, options = self._text.token_ids, self._options
        first = 1 + index * self._stride
        end = first + options.context_tokens - 1
        token_ids = [text[0], *text[first:end]]
        targets = torch.tensor(text[end : end + options.next_tokens])
        others = (*text[1:first], *text[end + options.next_tokens :])
        edits = {kind: self._draw(kind, token_ids, others, index) for kind in options.kinds}
        reference = torch.empty(0)
        for kind, mode, context in self._edited_contexts(token_ids[:-1], edits):
            found = self._found[kind, mode]
            num_behind = len(context.context_ids) - edits[kind].first_token
            found.reused.append(1 - context.num_computed / num_behind)
            logits = context.feed([token_ids[-1], *targets[:-1].tolist()])
            predicted = logits.double().log_softmax(dim=-1)  # [next tokens, vocab]
            if mode == EXACT:
                reference = predicted
            found.losses.append(functional.nll_loss(predicted, targets, reduction="none"))
            divergence = (reference.exp() * (reference - predicted)).sum(dim=-1)
            found.divergences.append(float(divergence.mean()))
            agreed = reference.argmax(dim=-1) == predicted.argmax(dim=-1)
            found.agreed.append(int(agreed.sum()))

    def _draw(
        self, kind: Kind, token_ids: Sequence[int], others: Sequence[int], index: int
    ) -> Edit:
        rng = Random(f"{kind}/{self._options.seed}/{index}")  # noqa: S311 - draws need no secrecy
        return draw_edit(kind, token_ids, others, self._writer, rng)

    def _ask(self, seed: str) -> None:
        """Edit one conversation about records, and ask the questions."""
        said = converse(self._records, self._options.context_tokens, seed)
        asked = {
            kind: edit_records(kind, said, self._records, seed) for kind in self._options.kinds
        }
        edits = {kind: each.edit for kind, each in asked.items()}
        for kind, mode, context in self._edited_contexts(said.token_ids[:-1], edits):
            context.feed(said.token_ids[-1:], want="none")
            self._answer(context, asked[kind], self._found[kind, mode])

    def _answer(self, context: Context, asked: EditQuestions, found: Found) -> None:
        question, ids = self._records.question, context.context_ids
        found.kept.append(check_answer(context, question(asked.kept, ids)).is_right)
        if asked.brought is not None:
            found.brought.append(check_answer(context, question(asked.brought, ids)).is_right)
        old = check_answer(context, question(asked.old, ids))
        found.stale.append(old.is_right)
        found.old_value.append(old.log_probability)

    def _edited_contexts(
        self, token_ids: list[int], edits: dict[Kind, Edit]
    ) -> Iterator[tuple[Kind, MeasuredMode, Context]]:
        """Yield a context after each edit by each mode; use it before the next one."""
        with Context(self._model, "ca") as whole:
            whole.feed(token_ids, want="none")
            for kind, edit in edits.items():
                for mode in self._options.modes:
                    with Context(self._model, "ca") as context:
                        context.apply_edit(whole, edit, mode)
                        yield kind, mode, context


def measure_edits(
    model: EvalModel, options: EditsOptions, on_progress: Callable[[str], None]
) -> EditsReport:
    """Edit every context by every kind, and continue by every mode; raises as `EditsEval` does."""
    measured = EditsEval(model, options)
    for index in range(options.num_contexts):
        on_progress(f"context {index + 1}/{options.num_contexts}")
        measured.run(index)
    return measured.report()


def _load(options: EditsOptions, model: EvalModel) -> tuple[str, EvalText]:
    """Read the text to be edited; return its name and the encoded text."""
    files = [path for path in (options.text, options.conversations) if path is not None]
    texts = [] if options.text is None else [read_text(options.text)]
    if options.conversations is not None or not files:
        texts += read_conversations(options.conversations or DEMO)
    name = " and ".join(path.name for path in files) or "the demo's conversations"
    return name, encode_text("\n\n".join(texts), model)


def _check(options: EditsOptions, text: EvalText, model: EvalModel) -> None:
    behind_tokens = max(options.next_tokens, ROOM)
    most_tokens = options.context_tokens + options.context_tokens // 16 + ROOM + behind_tokens
    if most_tokens > model.window_tokens:
        raise InvalidInputError(
            f"a context of {options.context_tokens} tokens, which an edit may lengthen, and "
            f"the {behind_tokens} after it exceed the window of {model.window_tokens}",
            "give a smaller --context or --next",
        )
    num_needed = 2 * (options.context_tokens + options.next_tokens)
    if len(text.token_ids) < num_needed:
        raise UnusableTextError(
            f"the text has {len(text.token_ids)} tokens, which are too few to edit "
            f"{options.context_tokens} and to judge the next {options.next_tokens}",
            f"give a text of at least {num_needed} tokens, or a smaller --context",
        )


def _figures(found: Found, exact: Found, text: EvalText) -> EditQuality:
    losses, reference = torch.cat(found.losses), torch.cat(exact.losses)
    pairs = zip(found.old_value, exact.old_value, strict=True)
    return EditQuality(
        kind=found.kind,
        mode=found.mode,
        reused=sum(found.reused) / len(found.reused),
        next_tokens=perplexity_of(losses, (len(text.token_ids) - 1) / text.num_words),
        to_exact=ratio_of(losses, reference, 1.0, len(found.losses[0])),
        divergence=mean(found.divergences),
        agreement=share(sum(found.agreed), len(losses)),
        kept=share(sum(found.kept), len(found.kept)),
        brought=share(sum(found.brought), len(found.brought)) if found.brought else None,
        stale=share(sum(found.stale), len(found.stale)),
        old_value=mean([ours - theirs for ours, theirs in pairs]),
        num_edits=len(found.losses),
    )
