"""Invalid answers of kvd are detected before any memory is touched."""

import os
from dataclasses import replace

import pytest

from shared.kvd_client.arena_map import ArenaMap, ProgressWords
from shared.kvd_client.grants import KvdProtocolError, load_grant, store_grant
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.errors import LoadFailedError
from shared.types.granted_slots import GrantedState, GrantedWindow, Lookup
from shared.types.kv_layout import Component, KVLayout, Layer

LAYOUT = KVLayout("m", (Layer((Component("k", (4, 16), "float32"),)),), 16)
WITH_STATES = replace(LAYOUT, position_mode="coupled", state_bytes=2 * LAYOUT.block_bytes)
SPAN = kvd_pb2.LoadSpan(slot_id=1, start=0, num_tokens=16, token_offset=0, tier=kvd_pb2.TIER_SSD)
TAIL = kvd_pb2.LoadSpan(slot_id=2, start=3, num_tokens=4, token_offset=16, tier=kvd_pb2.TIER_DRAM)
BLOCK = kvd_pb2.StoreBlock(slot_id=1, token_offset=16, num_tokens=16)


@pytest.fixture
def arena():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4 * 4096)
    yield ArenaMap(fd, 4096, 4)
    os.close(fd)


@pytest.fixture
def words():
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    yield ProgressWords(fd, 4)
    os.close(fd)


def _change(message, **fields):
    copy = type(message)()
    copy.CopyFrom(message)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def _columns(spans):
    return kvd_pb2.LoadSpans(
        slot_ids=[span.slot_id for span in spans],
        starts=[span.start for span in spans],
        num_tokens=[span.num_tokens for span in spans],
        generations=[span.generation for span in spans],
        tiers=[span.tier for span in spans],
    )


@pytest.fixture(params=["columns", "spans"])
def load(request, arena, words):
    """Decode an answer whose spans come as columns, or one by one as those of an older kvd."""
    form = request.param

    def loaded(
        spans,
        end_token=20,
        lookup=kvd_pb2.LOOKUP_HIT,
        num_tokens=40,
        layout=LAYOUT,
        more=True,
        **fields,
    ):
        request = kvd_pb2.PrepareLoadRequest(
            token_ids=bytes(4 * num_tokens), accept_pending=fields.pop("accept_pending", False)
        )
        fields = {"lease_id": 9, form: _columns(spans) if form == "columns" else spans, **fields}
        response = kvd_pb2.PrepareLoadResponse(
            lookup=lookup, end_token=end_token, more=more, **fields
        )
        return load_grant(response, request, arena, layout, words)

    return loaded


def _block_columns(blocks):
    return kvd_pb2.StoreBlocks(
        slot_ids=[block.slot_id for block in blocks],
        token_offsets=[block.token_offset for block in blocks],
        num_tokens=[block.num_tokens for block in blocks],
        generations=[block.generation for block in blocks],
    )


def _store(
    arena,
    blocks,
    end_token=32,
    lease_id=9,
    layout=LAYOUT,
    load_ends=(),
    one_by_one=False,
    **fields,
):
    """Decode an answer whose blocks come as columns, or one by one as those of an older kvd."""
    request = kvd_pb2.PrepareStoreRequest(
        token_ids=bytes(4 * 40), from_token=16, load_ends=load_ends
    )
    sent = {"blocks": blocks} if one_by_one else {"columns": _block_columns(blocks)}
    fields = {**sent, **fields}
    response = kvd_pb2.PrepareStoreResponse(lease_id=lease_id, end_token=end_token, **fields)
    return store_grant(response, request, arena, layout)


def test_a_valid_hit_is_accepted(load):
    """A sound hit is taken over as it is."""
    grant = load([SPAN, TAIL])
    assert (grant.lookup, grant.end_token, grant.more) == (Lookup.HIT, 20, True)
    assert [(span.slot_id, span.tier) for span in grant.spans] == [(1, "ssd"), (2, "dram")]


def test_a_wait_for_a_fetch(load):
    """It is reported; a negative one, or one without a fetch, is invalid."""
    assert load([SPAN, TAIL], fetch_waited_s=1.5).fetch_waited_s == 1.5
    for waited_s in (-1.0, float("nan")):
        with pytest.raises(KvdProtocolError, match="wait"):
            load([SPAN, TAIL], fetch_waited_s=waited_s)


def test_a_miss_has_a_reason_and_no_lease(load):
    """A miss has nothing to complete, and always a reason."""
    grant = load([], lookup=kvd_pb2.LOOKUP_MISS, lease_id=0)
    assert (grant.lookup, grant.miss_reason, grant.more) == (Lookup.MISS, "miss", False)


@pytest.mark.parametrize(
    "spans",
    [
        [_change(SPAN, slot_id=4), TAIL],
        [_change(SPAN, num_tokens=17), TAIL],
        [_change(SPAN, start=1), TAIL],
        [_change(SPAN, num_tokens=0), TAIL],
        [TAIL],
        [SPAN],
        [],
    ],
)
def test_invalid_spans(load, spans):
    """Slots outside the arena, rows outside the block, and wrong ends are refused."""
    with pytest.raises(KvdProtocolError):
        load(spans)


@pytest.mark.parametrize("load", ["spans"], indirect=True)
@pytest.mark.parametrize("spans", [[SPAN, _change(TAIL, token_offset=17)], [TAIL, SPAN]])
def test_gaps(load, spans):
    """Columns cannot have them."""
    with pytest.raises(KvdProtocolError, match="from"):
        load(spans)


@pytest.mark.parametrize("load", ["columns"], indirect=True)
@pytest.mark.parametrize("name", [field.name for field in kvd_pb2.LoadSpans.DESCRIPTOR.fields])
def test_columns_of_different_lengths(load, name):
    """No span is made of what is there."""
    columns = _columns([SPAN, TAIL])
    getattr(columns, name).pop()
    with pytest.raises(KvdProtocolError, match=r"columns of \[1, 2\] spans"):
        load([], columns=columns)


def test_invalid_lookups(load):
    """A hit without a lease, a miss with one, a pending answer, more tokens than asked for."""
    for fields in (
        {"lease_id": 0},
        {"lookup": kvd_pb2.LOOKUP_MISS},
        {"lookup": kvd_pb2.LOOKUP_PENDING},
        {"lookup": kvd_pb2.LOOKUP_UNSPECIFIED},
        {"num_tokens": 19},
    ):
        with pytest.raises(KvdProtocolError):
            load([SPAN, TAIL], **fields)


PENDING = {"lookup": kvd_pb2.LOOKUP_PENDING, "accept_pending": True}


def test_a_pending_grant_is_accepted(load, words):
    """It names the word of its progress."""
    grant = load([SPAN, TAIL], progress_index=3, **PENDING)
    assert (grant.lookup, grant.more) == (Lookup.PENDING, True)
    words.end("the end")
    with pytest.raises(LoadFailedError):
        grant.progress.wait_layer(0, 60)


def test_invalid_pending_grants(load):
    """A word that does not exist, a grant without spans or lease."""
    for spans, fields in (
        ([SPAN, TAIL], {"progress_index": 4}),
        ([SPAN, TAIL], {"lease_id": 0}),
        ([], {}),
    ):
        with pytest.raises(KvdProtocolError):
            load(spans, **PENDING, **fields)


def test_a_valid_store_is_accepted(arena):
    """One without a lease needs no completion."""
    assert _store(arena, [BLOCK]).blocks[0].token_offset == 16
    refused = _store(arena, [], lease_id=0, end_token=0, refused_reason="no_space")
    assert (refused.lease_id, refused.refused_reason) == (0, "no_space")


@pytest.mark.parametrize(
    "blocks",
    [
        [_change(BLOCK, slot_id=9)],
        [_change(BLOCK, num_tokens=17)],
        [_change(BLOCK, token_offset=15)],
        [_change(BLOCK, token_offset=30)],
        [BLOCK, _change(BLOCK, token_offset=32, num_tokens=4)],
        [],
    ],
)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_invalid_blocks(arena, blocks, one_by_one):
    """Blocks outside arena or tokens, or that share a slot, are refused."""
    with pytest.raises(KvdProtocolError):
        _store(arena, blocks, one_by_one=one_by_one)


def test_blocks_of_an_older_kvd(arena):
    """They come one by one, and give the same grant."""
    assert _store(arena, [BLOCK], one_by_one=True) == _store(arena, [BLOCK])


@pytest.mark.parametrize("name", [field.name for field in kvd_pb2.StoreBlocks.DESCRIPTOR.fields])
def test_block_columns_of_different_lengths(arena, name):
    """No block is made of what is there."""
    columns = _block_columns([BLOCK, BLOCK])
    getattr(columns, name).pop()
    with pytest.raises(KvdProtocolError, match="blocks in"):
        _store(arena, [], columns=columns)


def test_grants_are_immutable_values(load):
    """A grant is frozen and can be compared."""
    grant = load([SPAN, TAIL])
    assert replace(grant) == grant


STATE = kvd_pb2.GrantedState(position=20, slot_ids=[0, 3], generations=[7, 8])


def test_a_state_belongs_to_the_tokens_before_it(load):
    """It ends the load; without one there is more to come."""
    grant = load([SPAN, TAIL], layout=WITH_STATES, state=STATE, more=False)
    assert grant.state == GrantedState(20, (0, 3), (7, 8))
    assert load([SPAN, TAIL], layout=WITH_STATES).state is None


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": WITH_STATES, "more": False},
        {"layout": WITH_STATES, "state": _change(STATE, position=19)},
        {"layout": LAYOUT, "state": STATE},
        {"layout": WITH_STATES, "state": kvd_pb2.GrantedState(position=20)},
        {
            "layout": WITH_STATES,
            "state": kvd_pb2.GrantedState(position=20, slot_ids=[0, 4], generations=[7, 8]),
        },
        {
            "layout": WITH_STATES,
            "state": kvd_pb2.GrantedState(position=20, slot_ids=[0, 0], generations=[7, 8]),
        },
        {
            "layout": WITH_STATES,
            "state": kvd_pb2.GrantedState(position=20, slot_ids=[0, 1], generations=[7]),
        },
    ],
)
def test_invalid_states(load, fields):
    with pytest.raises(KvdProtocolError):
        load([SPAN, TAIL], **fields)


def test_a_miss_has_no_state(load):
    with pytest.raises(KvdProtocolError):
        load([], lookup=kvd_pb2.LOOKUP_MISS, layout=WITH_STATES, state=STATE, lease_id=0)


def test_states_that_have_to_be_stored(arena):
    """Beside blocks or without any; only requested ones, and in separate slots."""
    wanted = {"layout": WITH_STATES, "load_ends": [20, 40]}
    grant = _store(arena, [BLOCK], states=[STATE], **wanted)
    assert [state.position for state in grant.states] == [20]
    assert _store(arena, [], states=[STATE], **wanted).states == grant.states
    for states in (
        [_change(STATE, position=21)],
        [_change(STATE, position=40)],  # behind end_token
        [STATE, STATE],
        [kvd_pb2.GrantedState(position=20, slot_ids=[0, 1], generations=[7, 8])],  # the block's
    ):
        with pytest.raises(KvdProtocolError):
            _store(arena, [BLOCK], states=states, **wanted)
    with pytest.raises(KvdProtocolError):
        _store(arena, [], states=[STATE], lease_id=0, **wanted)


LAYER = LAYOUT.layers[0]
WITH_WINDOWS = replace(LAYOUT, layers=(LAYER, *[replace(LAYER, window=20)] * 2))
WINDOW = kvd_pb2.GrantedWindow(
    token_offset=0, num_tokens=16, start=0, slot_ids=[0, 3], generations=[7, 8]
)
LAST_WINDOW = kvd_pb2.GrantedWindow(
    token_offset=16, num_tokens=4, start=3, slot_ids=[5, 4], generations=[1, 2]
)


@pytest.fixture
def wide_arena():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8 * 4096)
    yield ArenaMap(fd, 4096, 8)
    os.close(fd)


def test_windows_belong_to_the_tokens_before_them(load, arena):
    """All that layers attend to from the end on; without them there is more to come."""
    span = _change(SPAN, slot_id=2)
    window = kvd_pb2.GrantedWindow(
        token_offset=0, num_tokens=16, slot_ids=[0, 3], generations=[7, 8]
    )
    wanted = {"end_token": 16, "layout": WITH_WINDOWS}
    grant = load([span], windows=[window], more=False, **wanted)
    assert grant.windows == (GrantedWindow(0, 16, 0, (0, 3), (7, 8)),)
    assert load([span], **wanted).windows == ()
    for fields in (
        {"more": False},
        {"windows": [window]},  # with more to come
        {"windows": [window, window], "more": False},
        {"windows": [_change(window, num_tokens=15)], "more": False},
        {"windows": [_change(window, token_offset=1, num_tokens=15)], "more": False},
        {"windows": [_change(window, start=1)], "more": False},
        {"windows": [window], "more": False, "layout": LAYOUT},
    ):
        with pytest.raises(KvdProtocolError):
            load([span], **{**wanted, **fields})


def test_windows_that_have_to_be_stored(wide_arena):
    """Beside blocks or without any, in separate slots, of tokens that the engine has."""
    wanted = {"layout": WITH_WINDOWS, "load_ends": [99]}
    window = _change(LAST_WINDOW, start=0)
    grant = _store(wide_arena, [BLOCK], windows=[window], **wanted)
    assert grant.windows == (GrantedWindow(16, 4, 0, (5, 4), (1, 2)),)
    assert _store(wide_arena, [], windows=[window], **wanted).windows == grant.windows
    for windows, fields in (
        ([LAST_WINDOW], {}),  # not from its first row on
        ([WINDOW], {}),  # before from_token
        ([window, window], {}),
        ([_change(window, token_offset=30)], {}),  # behind end_token
        ([kvd_pb2.GrantedWindow(token_offset=16, num_tokens=4, slot_ids=[5])], {}),
        (
            [
                kvd_pb2.GrantedWindow(
                    token_offset=16, num_tokens=4, slot_ids=[5, 1], generations=[1, 2]
                )
            ],
            {},
        ),  # the block's
        ([window], {"lease_id": 0}),
        ([window], {"load_ends": []}),
        ([window], {"layout": LAYOUT}),
    ):
        with pytest.raises(KvdProtocolError):
            _store(wide_arena, [BLOCK], windows=windows, **{**wanted, **fields})
