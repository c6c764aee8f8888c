"""Residents: which requests they serve, and which are evicted first."""

from dataclasses import replace

import pytest

from inference_svc.core.scheduling.held_slots import ContiguousSlots, Holding
from inference_svc.core.scheduling.paged_slots import PagedSlots
from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.residents import Resident, Residents
from shared.types.lineage import WHOLE, Lineage
from shared.types.session_key import SessionKey
from tests.inference_svc.core.scheduling.test_scheduler import calls_of


def key(name):
    return SessionKey("default", "0f", name)


def resident(name, token_ids=(1, 2, 3), capacity_tokens=10, last_used_ns=0, lineage=None):
    holding = Holding(capacity_tokens)
    return Resident(key(name), token_ids, holding, last_used_ns, lineage, boundary=0)


def request(name, token_ids, lineage=None):
    return Request(1, key(name), list(token_ids), 4, arrived_ns=0, lineage=lineage)


@pytest.mark.parametrize(
    ("held", "prompt", "num_tokens"),
    [
        ([1, 2, 3], [1, 2, 3, 4, 5], 3),
        ([1, 2, 3], [1, 2, 3], 2),  # the last token is always computed
        ([1, 2, 3, 4, 5], [1, 2, 3], 2),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([9, 2, 3], [1, 2, 3, 4], 0),
        ([], [1, 2], 0),
        ([1], [1], 0),
    ],
)
def test_a_resident_serves_the_common_prefix(held, prompt, num_tokens):
    """Rows count as far as their tokens match the prompt's, without its last one."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", held))
    wanted = request("a", prompt)
    assert residents.match(wanted) == num_tokens
    assert residents.match(wanted) == num_tokens
    assert residents.match(request("b", prompt)) == 0


def test_a_match_is_not_kept_beyond_its_resident():
    """Another resident of the session is compared anew."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", [1, 2, 3]))
    wanted = request("a", [1, 2, 3, 4])
    assert residents.match(wanted) == 3
    residents.take(key("a"))
    assert residents.match(wanted) == 0
    residents.put(resident("a", [1, 2]))
    assert residents.match(wanted) == 2


LINEAGES = [None, WHOLE, Lineage(b"one", 2), Lineage(b"other", 2)]


@pytest.mark.parametrize("ours", LINEAGES)
@pytest.mark.parametrize("theirs", LINEAGES)
def test_rows_of_another_lineage_are_useless(ours, theirs):
    """Even with equal tokens; a request without a lineage matches only rows without one."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", [7, 7, 7], lineage=ours))
    assert residents.match(request("a", [7, 7, 7, 7], theirs)) == (3 if ours == theirs else 0)


def test_a_request_that_is_cut_while_it_waits_is_compared_again():
    """Its old match is void; after the compaction it matches again."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", [7, 7, 7], lineage=WHOLE))
    wanted = request("a", [7, 7, 7, 7], WHOLE)
    assert residents.match(wanted) == 3
    wanted.lineage = Lineage(b"one", 0)
    wanted.discard(((0, 1),))
    assert residents.match(wanted) == 0
    residents.begin_compaction(key("a"))
    assert residents.end_compaction(key("a"), [7, 7], wanted.lineage)
    assert residents.match(wanted) == 2


def test_a_resident_copied_while_its_tokens_were_dropped_does_not_match():
    """It keeps its old lineage, which differs from that of the rest."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", [7, 7, 7], lineage=WHOLE))
    copier = request("a", [7, 7, 7, 7], WHOLE)
    residents.begin_copy(key("a"), copier)
    assert not residents.begin_compaction(key("a"))
    residents.cancel_copy(copier)
    assert residents.match(request("a", [7, 7, 7], Lineage(b"one", 0))) == 0


def test_victims_are_the_idle_ones_then_the_tail_of_the_queue():
    """Sessions that return soonest stay longest; idle ones go by last use."""
    residents, places = (
        Residents(ContiguousSlots(1000)),
        {key("q1"): (0, 1.0, 1), key("q2"): (0, 2.0, 2)},
    )
    for name, used_ns in (("q1", 1), ("new", 9), ("old", 3), ("q2", 2)):
        residents.put(resident(name, last_used_ns=used_ns))
    chosen = residents.victims(1000, places.get, key("nobody"))
    assert [victim.session_id for victim in chosen] == ["old", "new", "q2", "q1"]


def test_no_more_victims_than_it_takes():
    """Enough rows are enough."""
    residents = Residents(ContiguousSlots(1000))
    for used_ns, name in enumerate("abcd"):
        residents.put(resident(name, last_used_ns=used_ns))
    assert residents.victims(0, {}.get, key("z")) == []
    assert residents.victims(1, {}.get, key("z")) == [key("a")]
    assert residents.victims(11, {}.get, key("a")) == [key("b"), key("c")]


def test_who_need_not_go_once_a_larger_one_goes_stays():
    """The small one is older, and goes first where it is enough."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("small", capacity_tokens=5, last_used_ns=1))
    residents.put(resident("large", capacity_tokens=50, last_used_ns=2))
    assert residents.victims(5, {}.get) == [key("small")]
    assert residents.victims(50, {}.get) == [key("large")]
    assert residents.victims(51, {}.get) == [key("small"), key("large")]


def cost_of_evicting(num_residents):
    """How many Python functions it takes to find that all of them have to go."""
    slots = PagedSlots(4 * num_residents, 4)
    residents = Residents(slots, 4)
    for number in range(num_residents):
        tokens = tuple(range(100 * number, 100 * number + 16))
        residents.put(Resident(key(str(number)), tokens, slots.take(16), number))
    return calls_of(lambda: residents.victims(slots.num_slots, {}.get))


def test_the_cost_of_finding_victims_grows_with_their_pages():
    """Not with the pages of all those that were chosen before, once more for each."""
    assert cost_of_evicting(200) < 11 * cost_of_evicting(20)


def test_what_is_being_copied_is_no_victim():
    """Its rows are being read; they count, but cannot be had."""
    slots = ContiguousSlots(1000)
    residents = Residents(slots)
    residents.put(resident("a"))
    residents.put(resident("b"))
    residents.begin_copy(key("a"), request("c", [1, 2, 3, 4]))
    assert residents.is_busy(key("a"))
    assert slots.evictable_slots == 10
    assert residents.num_slots == 20
    assert residents.victims(1000, {}.get, key("z")) == [key("b")]
    assert residents.unqueued({}.get) == [key("b")]
    with pytest.raises(AssertionError, match="being copied"):
        residents.take(key("a"))
    residents.check()


def make_numbered(number, name, token_ids):
    return Request(number, key(name), list(token_ids), 4, arrived_ns=0)


def test_a_copy_for_the_session_itself_frees_the_resident():
    """After the copy its slots are free; a request that gives up leaves it in place."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a"))
    copier, other = make_numbered(1, "a", [1, 2, 3, 4]), make_numbered(2, "b", [1])
    residents.begin_copy(key("a"), copier)
    residents.cancel_copy(other)
    assert residents.is_copied_to(copier)
    residents.cancel_copy(copier)
    assert key("a") in residents
    residents.begin_copy(key("a"), copier)
    assert residents.end_copy(copier)
    assert len(residents) == 0
    assert residents.num_slots == 0
    assert not residents.end_copy(copier)


def test_a_copy_for_other_sessions_leaves_the_resident_where_it_is():
    """Several requests may copy it at once; it is busy until the last copy has ended."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a"))
    copiers = make_numbered(1, "b", [1, 2, 3, 4]), make_numbered(2, "c", [1, 2, 9])
    for copier in copiers:
        residents.begin_copy(key("a"), copier)
    for copier in copiers:
        assert residents.is_busy(key("a"))
        assert not residents.end_copy(copier)
    assert not residents.is_busy(key("a"))
    assert key("a") in residents
    residents.check()


def find_shared(residents, asked):
    found = residents.shared_prefix(asked)
    return found and (found[0].key, found[1])


def test_a_prefix_is_shared_within_a_tenant_a_model_and_a_lineage():
    """Only these make the KV of equal tokens equal; the last token is always computed."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", [7, 7, 7], lineage=WHOLE))
    assert find_shared(residents, request("b", [7, 7, 7], WHOLE)) == (key("a"), 2)
    assert find_shared(residents, request("b", [7, 7, 7, 8], WHOLE)) == (key("a"), 3)
    assert residents.shared_prefix(request("b", [8, 7, 7], WHOLE)) is None
    assert residents.shared_prefix(request("a", [7, 7, 7], WHOLE)) is None, "that is its own"
    assert residents.shared_prefix(request("b", [7, 7, 7])) is None
    assert residents.shared_prefix(request("b", [7, 7, 7], Lineage(b"one", 2))) is None
    for other in (SessionKey("other", "0f", "b"), SessionKey("default", "1e", "b")):
        asked = Request(1, other, [7, 7, 7], 4, arrived_ns=0, lineage=WHOLE)
        assert residents.shared_prefix(asked) is None


def test_a_resident_is_found_by_its_present_rows():
    """Not during compaction; then by the rest, and no more once it is gone."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a", [1, 2, 3], lineage=WHOLE))
    residents.begin_compaction(key("a"))
    assert residents.shared_prefix(request("b", [1, 2, 3], WHOLE)) is None
    after = Lineage(b"one", 0)
    assert residents.end_compaction(key("a"), [2, 3], after)
    assert residents.shared_prefix(request("b", [1, 2, 3], WHOLE)) is None
    assert find_shared(residents, request("b", [2, 3, 4], after)) == (key("a"), 2)
    residents.take(key("a"))
    assert residents.shared_prefix(request("b", [2, 3, 4], after)) is None


def test_a_session_deleted_while_it_is_copied_is_removed_at_once():
    """The copying request holds its memory."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a"))
    copier = make_numbered(1, "b", [1, 2, 3, 4])
    residents.begin_copy(key("a"), copier)
    assert residents.drop(key("a"))
    assert not residents.is_copied_to(copier)
    assert not residents.end_copy(copier)
    residents.check()


def test_a_session_has_one_resident():
    """A second one violates an invariant."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a"))
    with pytest.raises(AssertionError, match="has a resident"):
        residents.put(resident("a"))


def test_a_resident_is_protected_while_it_is_compacted():
    """It is no victim, and neither taken nor moved; then it has the remaining rows."""
    slots = ContiguousSlots(1000)
    residents = Residents(slots, most=0)
    residents.put(resident("a"))
    residents.put(resident("b"))
    assert residents.begin_compaction(key("a"))
    assert not residents.begin_compaction(key("a")), "one shift at a time"
    assert not residents.begin_compaction(key("z")), "there is none"
    assert residents.is_busy(key("a"))
    assert slots.evictable_slots == 10
    assert residents.victims(1000, {}.get, key("z")) == [key("b")]
    assert residents.take_surplus({}.get) == [key("b")]
    with pytest.raises(AssertionError, match="being compacted"):
        residents.begin_copy(key("a"), request("a", [1, 2, 3, 4]))
    residents.check()
    assert residents.end_compaction(key("a"), [3])
    assert residents.get(key("a")).token_ids == (3,)
    assert residents.match(request("a", [3, 9])) == 1
    assert residents.drop(key("a"))


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_resident_without_rows_or_session_is_removed_after_compaction(is_dropped):
    """A caller that drops it earlier need not wait."""
    residents = Residents(ContiguousSlots(1000))
    residents.put(resident("a"))
    residents.begin_compaction(key("a"))
    if is_dropped:
        assert not residents.drop(key("a"))
    assert not residents.end_compaction(key("a"), [3] if is_dropped else [])
    assert (len(residents), residents.num_slots) == (0, 0)
    residents.check()


@pytest.mark.parametrize(
    ("held", "prompt", "num_tokens"),
    [
        ([1, 2, 3], [1, 2, 3, 4, 5], 3),
        ([1, 2, 3], [1, 2, 3], 0),  # the last token is always computed
        ([1, 2, 3, 4, 5], [1, 2, 3, 9], 0),
        ([1, 2, 3], [1, 2, 9, 4], 0),
    ],
)
def test_a_resident_with_a_state_matches_completely_or_not_at_all(held, prompt, num_tokens):
    """A state cannot be cut."""
    residents = Residents(ContiguousSlots(1000), have_states=True)
    residents.put(resident("a", held))
    assert residents.match(request("a", prompt)) == num_tokens


def test_the_number_of_residents_is_bounded():
    """The least recently used go first."""
    residents = Residents(ContiguousSlots(1000), most=1)
    for number, name in enumerate("abc"):
        residents.put(resident(name, last_used_ns=number))
    assert residents.take_surplus({}.get) == [key("a"), key("b")]
    assert not residents.take_surplus({}.get)


@pytest.mark.parametrize(("prompt", "num_tokens"), [([7] * 9, 8), ([7] * 7, 6), ([7] * 6, 0)])
def test_a_resident_is_used_where_layers_with_a_window_are_complete(prompt, num_tokens):
    """It was loaded: these layers lack rows before the third token, and attend to 4."""
    residents = Residents(ContiguousSlots(1000), attention_window=4)
    residents.put(replace(resident("a", [7] * 8), window_from=2))
    assert residents.match(request("a", prompt)) == num_tokens


@pytest.mark.parametrize(
    ("window_from", "dropped", "stays"),
    [(0, (4, 6), True), (2, (4, 6), True), (3, (4, 6), False), (3, (1, 3), True)],
)
def test_a_resident_is_removed_when_too_much_of_its_window_is_dropped(window_from, dropped, stays):
    """The rest is useless."""
    slots = ContiguousSlots(1000)
    residents = Residents(slots, attention_window=4)
    residents.put(replace(resident("a", [7] * 8), window_from=window_from))
    residents.begin_compaction(key("a"))
    assert residents.end_compaction(key("a"), [7] * 6, None, [dropped]) == stays
    assert len(residents) == stays
    residents.check()
