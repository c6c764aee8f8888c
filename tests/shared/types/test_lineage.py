"""A lineage distinguishes contexts with equal tokens, and no others."""

from shared.types.lineage import WHOLE, Lineage

TOKENS = bytes(range(40))  # ten of them


def test_it_follows_from_tokens_and_discards():
    """Equal ones give equal lineages; any other token or range gives another."""
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


def test_dropping_the_end_does_not_change_the_rest():
    """Also dropping everything: later tokens are computed from nothing."""
    lineage = WHOLE.after(TOKENS, [(4, 5)])
    assert WHOLE.after(TOKENS, [(3, 10)]) == WHOLE.after(TOKENS, [(0, 10)]) == WHOLE
    assert lineage.after(TOKENS, [(6, 10)]) == lineage
    assert lineage.after(TOKENS, [(4, 10)]) == WHOLE
    assert lineage.after(TOKENS, ()) == lineage
    assert Lineage() == WHOLE


def test_a_graft_follows_from_both_contexts_and_the_range():
    """Any other token, lineage or range gives another; tokens behind the range do not matter."""
    other = WHOLE.after(TOKENS, [(4, 5)])
    lineage = WHOLE.after_graft(TOKENS[:8], WHOLE, TOKENS, 3, 7)
    assert lineage == WHOLE.after_graft(TOKENS[:8], WHOLE, TOKENS[:28], 3, 7)
    others = (
        WHOLE.after_graft(TOKENS[:12], WHOLE, TOKENS, 3, 7),
        WHOLE.after_graft(TOKENS[4:12], WHOLE, TOKENS, 3, 7),
        WHOLE.after_graft(TOKENS[:8], other, TOKENS, 3, 7),
        WHOLE.after_graft(TOKENS[:8], WHOLE, TOKENS[::-1], 3, 7),
        WHOLE.after_graft(TOKENS[:8], WHOLE, TOKENS, 2, 7),
        WHOLE.after_graft(TOKENS[:8], WHOLE, TOKENS, 3, 8),
        other.after_graft(TOKENS[:8], WHOLE, TOKENS, 3, 7),
        WHOLE,
    )
    assert len({lineage, *others}) == 9


def test_tokens_before_the_first_seam_are_clean():
    """A later graft adds none, an earlier discard removes some."""
    lineage = WHOLE.after_graft(TOKENS[:8], WHOLE, TOKENS, 3, 7)
    assert (lineage.is_whole, lineage.clean_tokens) == (False, 2)
    assert lineage.after_graft(TOKENS, WHOLE, TOKENS, 3, 7).clean_tokens == 2
    assert WHOLE.after(TOKENS, [(1, 2)]).after_graft(TOKENS, WHOLE, TOKENS, 0, 1).clean_tokens == 1
