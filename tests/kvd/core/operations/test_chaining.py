"""How keys follow from tokens and discards: equal computations share them, and no others do."""

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


def test_a_context_without_discards_has_the_same_keys_named_or_not():
    """That nothing was discarded is a lineage like the others, and changes no key."""
    named, unnamed = chaining(WHOLE), chaining()
    assert named.root == unnamed.root
    first = named.key(named.root, 0, FIRST)
    assert first == unnamed.key(unnamed.root, 0, FIRST)
    assert named.key(first, BLOCK_TOKENS, SECOND) == unnamed.key(first, BLOCK_TOKENS, SECOND)
    assert (named.is_named, unnamed.is_named) == (True, False)


def test_tenants_and_layouts_share_no_key():
    """The root is salted with the tenant, and made for the layout."""
    other_layout = replace(LAYOUT, block_tokens=2 * BLOCK_TOKENS)
    roots = {chaining().root, chaining(salt=salt_of("b")).root, chaining(layout=other_layout).root}
    assert len(roots) == 3


def test_the_first_discard_turns_the_chain():
    """What is computed behind it has another parent; what is before it has the old one."""
    cut = chaining(CUT)
    chain = cut.key(cut.root, 0, FIRST)
    assert chain == chaining().key(cut.root, 0, FIRST)
    assert cut.parent(chain, 4) == chain
    assert cut.parent(chain, CUT.clean_tokens) == cut.after_discards(CUT.clean_tokens) != chain


def test_no_block_lies_across_the_first_discard():
    """A block that would, ends where the clean tokens do."""
    cut = chaining(CUT)
    assert [cut.end_of_block(offset) for offset in (0, 4, 5, 6)] == [4, 6, 6, 10]
    assert chaining().end_of_block(4) == 8


def test_coupled_positions_know_no_discard():
    """Where positions are in the keys, only what was computed before a discard is ever kept."""
    coupled = chaining(CUT, replace(LAYOUT, position_mode="coupled"))
    assert coupled.lineage is WHOLE
    assert coupled.is_named
    assert coupled.end_of_block(4) == 8


def test_another_lineage_costs_no_new_root():
    """It is of the same tenant; the first one stays as it is."""
    whole = chaining(WHOLE)
    cut = whole.under(CUT)
    assert cut.root is whole.root
    assert (whole.lineage, cut.lineage) == (WHOLE, CUT)


def test_a_plain_span_holds_the_tokens_it_is_keyed_by():
    """At this place, behind this chain, and no others."""
    whole = chaining(WHOLE)
    span = plain_span(whole.key(whole.root, 0, FIRST), BLOCK_TOKENS)
    assert whole.holds(span, whole.root, 0, FIRST)
    assert not whole.holds(span, whole.root, 0, SECOND)
    assert not whole.holds(span, b"x" * 16, 0, FIRST)


def test_a_cut_span_is_found_by_its_digest_and_by_its_lineage_if_one_is_named():
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
