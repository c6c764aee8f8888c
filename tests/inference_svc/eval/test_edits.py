"""Drawn edits of text, and the modes by name."""

from random import Random

import pytest

from inference_svc.eval.edits import (
    CLEARED,
    EXACT,
    FIRST_TOKENS,
    KINDS,
    SUMMARY,
    Edit,
    Replacement,
    Writer,
    draw_edit,
    kinds_of,
    modes_of,
)
from shared.types.errors import InvalidInputError

LETTERS = Writer(lambda text: [ord(letter) for letter in text], lambda ids: "".join(map(chr, ids)))
TEXT = LETTERS.encode("One sentence of forty letters and a stop. " * 20)[:512]
OTHERS = LETTERS.encode("Something else that is said elsewhere. " * 20)


def draw(kind, seed=0):
    return draw_edit(kind, TEXT, OTHERS, LETTERS, Random(seed))  # noqa: S311 - draws need no secrecy


def apply_edit(edit, token_ids=TEXT):
    return [
        token
        for (start, end), new_ids in edit.runs(len(token_ids))
        for token in [*token_ids[start:end], *new_ids]
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 20))]
)
def test_an_edit_keeps_beginning_and_end(kind, seed):
    """Spans are sorted, separate and not empty; the last three eighths stay behind them."""
    edit = draw(kind, seed)
    ends = [place for span, _ in edit.replacements for place in span]
    assert ends == sorted(set(ends))
    assert ends[0] == edit.first_token >= FIRST_TOKENS
    assert ends[-1] <= len(TEXT) * 5 // 8
    assert apply_edit(edit)[: ends[0]] == TEXT[: ends[0]]
    assert apply_edit(edit)[ends[-1] - len(TEXT) :] == TEXT[ends[-1] :]


def test_each_kind_of_edit():
    """The replacements of spans, and the lengths of both."""
    cleared = [draw("clear", seed) for seed in range(20)]
    assert {len(edit.replacements) for edit in cleared} == {1, 2, 3}
    assert {LETTERS.decode(new) for edit in cleared for _, new in edit.replacements} == {CLEARED}
    for seed in range(20):
        (((start, end), new_ids),) = draw("replace", seed).replacements
        assert LETTERS.decode(new_ids) in LETTERS.decode(OTHERS)
        assert (end - start) // 2 <= len(new_ids) != end - start
        (((start, end), new_ids),) = draw("compact", seed).replacements
        assert end - start == 256 - FIRST_TOKENS
        assert LETTERS.decode(new_ids).startswith(SUMMARY)
        assert len(new_ids) <= (end - start) // 4
        (((start, end), new_ids),) = draw("delete", seed).replacements
        assert not new_ids
        assert 64 <= end - start <= 128


def test_the_seed_determines_the_edit():
    """And another seed another edit."""
    assert draw("replace", 7) == draw("replace", 7) != draw("replace", 8)


def test_kept_runs_lie_between_and_behind_the_spans():
    """Also if nothing is before the first span, or behind the last one."""
    edit = Edit((Replacement((0, 2), [7]), Replacement((3, 5), ())))
    assert list(edit.runs(5)) == [((0, 0), [7]), ((2, 3), ()), ((5, 5), ())]
    assert apply_edit(edit, [1, 2, 3, 4, 5]) == [7, 3]


def test_modes_are_read():
    """Exact is always among them, and first."""
    assert [mode.name for mode in modes_of("keep, HEAL:16,keep,exact")] == [
        "exact", "keep", "heal:16",
    ]  # fmt: skip
    assert modes_of("") == (EXACT,)
    assert [mode.healed_tokens for mode in modes_of("keep,heal:4,naive")] == [None, 0, 4, 0]
    assert [mode.moves for mode in modes_of("keep,naive")] == [True, True, False]


@pytest.mark.parametrize("text", ["heal", "heal:0", "heal:-1", "heal:x", "keep:4", "re"])
def test_another_mode_is_refused(text):
    """With those that there are."""
    with pytest.raises(
        InvalidInputError, match=r"there is no mode of edits named .*give one or more of exact, ke"
    ):
        modes_of(text)


def test_kinds_are_read():
    """Each once; none, or an unknown one, is refused."""
    assert kinds_of("delete,CLEAR,delete") == ("delete", "clear")
    for text in ("", "insert"):
        with pytest.raises(InvalidInputError, match=r"give one or more of clear, replace"):
            kinds_of(text)
