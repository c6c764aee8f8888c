"""A lineage tells contexts apart whose tokens are the same, and no others."""

from shared.types.lineage import WHOLE, Lineage

TOKENS = bytes(range(40))  # ten of them


def test_it_follows_from_tokens_and_discards():
    """The same ones give the same lineage; any other token or range gives another."""
    lineage = WHOLE.after(TOKENS, [(2, 4)])
    assert lineage == WHOLE.after(TOKENS, ((2, 4),))
    others = (
        WHOLE.after(TOKENS, [(2, 5)]),
        WHOLE.after(TOKENS, [(2, 4), (6, 7)]),
        WHOLE.after(bytes(reversed(TOKENS)), [(2, 4)]),
        WHOLE.after(TOKENS[4:], [(2, 4)]),
        lineage.after(TOKENS[8:], [(2, 4)]),
    )
    assert len({lineage, *others}) == 6


def test_clean_tokens_are_those_before_every_discard():
    """A later discard can only make them fewer."""
    lineage = WHOLE.after(TOKENS, [(4, 5)])
    assert lineage.after(TOKENS[4:], [(6, 7)]).clean_tokens == 4
    assert lineage.after(TOKENS[4:], [(1, 2), (6, 7)]).clean_tokens == 1
    assert [lineage.is_clean(end) for end in (0, 4, 5)] == [True, True, False]
    assert WHOLE.is_clean(1 << 40)


def test_dropping_the_end_leaves_the_rest_as_it_was():
    """Also everything: what comes then is computed from nothing."""
    lineage = WHOLE.after(TOKENS, [(4, 5)])
    assert WHOLE.after(TOKENS, [(3, 10)]) == WHOLE.after(TOKENS, [(0, 10)]) == WHOLE
    assert lineage.after(TOKENS, [(6, 10)]) == lineage
    assert lineage.after(TOKENS, [(4, 10)]) == WHOLE
    assert lineage.after(TOKENS, ()) == lineage
    assert Lineage() == WHOLE
