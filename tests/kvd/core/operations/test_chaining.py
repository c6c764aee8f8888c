"""How keys follow from tokens and discards: equal computations share keys, others do not."""

from dataclasses import replace

from kvd.core.operations.chaining import Chaining
from kvd.core.records.entries import Span, plain_span
from shared.types.lineage import WHOLE, Lineage
from tests.property.cache_world import BLOCK_TOKENS, LAYOUT, salt_of, to_bytes

SALT = salt_of("a")
FIRST, SECOND = to_bytes([1, 2, 3, 4]), to_bytes([5, 6, 7, 8])
CUT = WHOLE.after(to_bytes(list(range(20))), [(6, 9)])  # clean up to token 6


def chaining(lineage=None, layout=LAYOUT, salt=SALT):
    return Chaining(layout, salt, lineage)


def test_a_named_lineage_without_discards_has_the_same_keys():
    """WHOLE is a lineage like the others, and changes no key."""
    named, unnamed = chaining(WHOLE), chaining()
    assert named.root == unnamed.root
    first = named.key(named.root, 0, FIRST)
    assert first == unnamed.key(unnamed.root, 0, FIRST)
    assert named.key(first, BLOCK_TOKENS, SECOND) == unnamed.key(first, BLOCK_TOKENS, SECOND)
    assert (named.is_named, unnamed.is_named) == (True, False)


def test_tenants_and_layouts_share_no_key():
    """The root is salted with the tenant, and derived from the layout."""
    other_layout = replace(LAYOUT, block_tokens=2 * BLOCK_TOKENS)
    roots = {chaining().root, chaining(salt=salt_of("b")).root, chaining(layout=other_layout).root}
    assert len(roots) == 3


def test_the_first_discard_changes_the_chain():
    """Blocks computed behind it have another parent; those before it have the old one."""
    cut = chaining(CUT)
    chain = cut.key(cut.root, 0, FIRST)
    assert chain == chaining().key(cut.root, 0, FIRST)
    assert cut.parent(chain, 4) == chain
    assert cut.parent(chain, CUT.clean_tokens) == cut.after_discards(CUT.clean_tokens) != chain


def test_no_block_lies_across_the_first_discard():
    """A block that would ends at the last clean token."""
    cut = chaining(CUT)
    assert [cut.end_of_block(offset) for offset in (0, 4, 5, 6)] == [4, 6, 6, 10]
    assert chaining().end_of_block(4) == 8


def test_coupled_positions_have_no_keys_behind_a_discard():
    """Where keys depend on positions, only blocks computed before a discard are ever kept."""
    coupled = chaining(CUT, replace(LAYOUT, position_mode="coupled"))
    assert coupled.lineage is WHOLE
    assert coupled.is_named
    assert coupled.end_of_block(4) == 8


def test_another_lineage_makes_no_new_root():
    """The root is the tenant's; the first one stays as it is."""
    whole = chaining(WHOLE)
    cut = whole.under(CUT)
    assert cut.root is whole.root
    assert (whole.lineage, cut.lineage) == (WHOLE, CUT)


def test_a_plain_span_matches_its_own_tokens_only():
    """At this place, behind this chain."""
    whole = chaining(WHOLE)
    span = plain_span(whole.key(whole.root, 0, FIRST), BLOCK_TOKENS)
    assert whole.holds(span, whole.root, 0, FIRST)
    assert not whole.holds(span, whole.root, 0, SECOND)
    assert not whole.holds(span, b"x" * 16, 0, FIRST)


def test_a_cut_span_is_found_by_its_digest_and_a_named_lineage():
    """Equal tokens after other discards are another computation."""
    cut = chaining(CUT)
    tokens, end = FIRST[: 2 * 4], 8
    span = Span(b"k" * 16, 1, 2, cut.digest(tokens), cut.after_discards(end))
    assert cut.holds(span, cut.root, end - 2, tokens)
    assert not cut.holds(span, cut.root, end - 2, SECOND[: 2 * 4])
    other = chaining(Lineage(b"o" * 16, CUT.clean_tokens))
    assert not other.holds(span, other.root, end - 2, tokens)
    assert not chaining(WHOLE).holds(span, cut.root, end - 2, tokens)
    assert chaining().holds(span, cut.root, end - 2, tokens), "who names none trusts the tokens"
