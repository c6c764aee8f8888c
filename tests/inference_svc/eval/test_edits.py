"""Edits of text as they are drawn, and the modes as they are named."""

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


def drawn(kind, seed=0):
    return draw_edit(kind, TEXT, OTHERS, LETTERS, Random(seed))  # noqa: S311 - draws need no secrecy


def edited(edit, token_ids=TEXT):
    return [
        token
        for (start, end), new_ids in edit.runs(len(token_ids))
        for token in [*token_ids[start:end], *new_ids]
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(5, 20))]
)
def test_an_edit_leaves_beginning_and_end_as_they_are(kind, seed):
    """Spans are in order, apart and not empty; the last three eighths are kept behind them."""
    edit = drawn(kind, seed)
    ends = [place for span, _ in edit.replacements for place in span]
    assert ends == sorted(set(ends))
    assert ends[0] == edit.first_token >= FIRST_TOKENS
    assert ends[-1] <= len(TEXT) * 5 // 8
    assert edited(edit)[: ends[0]] == TEXT[: ends[0]]
    assert edited(edit)[ends[-1] - len(TEXT) :] == TEXT[ends[-1] :]


def test_each_kind_does_what_its_name_says():
    """What comes in the place of a span, and how long both are."""
    cleared = [drawn("clear", seed) for seed in range(20)]
    assert {len(edit.replacements) for edit in cleared} == {1, 2, 3}
    assert {LETTERS.decode(new) for edit in cleared for _, new in edit.replacements} == {CLEARED}
    for seed in range(20):
        (((start, end), new_ids),) = drawn("replace", seed).replacements
        assert LETTERS.decode(new_ids) in LETTERS.decode(OTHERS)
        assert (end - start) // 2 <= len(new_ids) != end - start
        (((start, end), new_ids),) = drawn("compact", seed).replacements
        assert end - start == 256 - FIRST_TOKENS
        assert LETTERS.decode(new_ids).startswith(SUMMARY)
        assert len(new_ids) <= (end - start) // 4
        (((start, end), new_ids),) = drawn("delete", seed).replacements
        assert not new_ids
        assert 64 <= end - start <= 128


def test_a_seed_draws_the_same_again():
    """And another seed another edit."""
    assert drawn("replace", 7) == drawn("replace", 7) != drawn("replace", 8)


def test_runs_are_what_is_left_and_what_comes_behind_it():
    """Also where nothing is before the first span, or behind the last one."""
    edit = Edit((Replacement((0, 2), [7]), Replacement((3, 5), ())))
    assert list(edit.runs(5)) == [((0, 0), [7]), ((2, 3), ()), ((5, 5), ())]
    assert edited(edit, [1, 2, 3, 4, 5]) == [7, 3]


def test_modes_are_named():
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


def test_kinds_are_named():
    """Each once; none, or another one, is refused."""
    assert kinds_of("delete,CLEAR,delete") == ("delete", "clear")
    for text in ("", "insert"):
        with pytest.raises(InvalidInputError, match=r"give one or more of clear, replace"):
            kinds_of(text)
