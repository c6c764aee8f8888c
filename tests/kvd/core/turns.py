"""Whole loads and stores against a CacheWorld, for tests of other things."""

from kvd.core.engine import CacheEngine
from kvd.core.eviction.policies import POLICIES
from kvd.core.inspection.session_filter import EVERYTHING
from kvd.core.records.actions import HashSlots
from kvd.core.records.entries import Span, unpack_spans
from kvd.core.records.records import LoadAnswer, SessionInfo, StoreAnswer
from kvd.core.records.tier import Tier
from kvd.core.state.limits import Limits
from shared.types.granted_slots import Lookup
from shared.types.lineage import Lineage
from shared.types.queue_delta import QueueChange, QueuedRequest
from shared.types.session_key import SessionKey
from tests.property.cache_world import MODEL, CacheWorld, compute, to_bytes
from tests.queue_changes import queue_change

A = SessionKey("a", MODEL, "a")
B = SessionKey("a", MODEL, "b")
C = SessionKey("a", MODEL, "c")
OTHER_TENANT = SessionKey("other", MODEL, "a")
ENGINE_ID = 1
ONES, TWOS, THREES = [1] * 4, [2] * 4, [3] * 4  # one block each


def new_world(
    num_slots: int = 16, num_extents: int = 64, policy: str = "lru", **limits
) -> CacheWorld:
    return CacheWorld(Limits(num_slots, num_extents, **limits), POLICIES[policy])


def queue_of(*keys: SessionKey) -> QueueChange:
    """Make a queue in which a turn of each of these sessions waits, in this order."""
    return queue_change([QueuedRequest((0, 0.0, number), key) for number, key in enumerate(keys)])


def prepare_store(
    world: CacheWorld, key: SessionKey, tokens: list[int], from_token: int = 0
) -> StoreAnswer:
    """Ask for slots and fill the granted ones."""
    answer = world.engine.stores.prepare(key, to_bytes(tokens), from_token, ENGINE_ID)
    rows = compute([], tokens)
    for block in answer.blocks:
        end = block.token_offset + block.num_tokens
        world.slots[block.slot_id] = rows[block.token_offset : end]
    world.pump()
    return answer


def complete_store(world: CacheWorld, answer: StoreAnswer, *, success: bool = True) -> int:
    stored = world.engine.stores.complete(answer.lease_id, ENGINE_ID, success=success)
    world.pump()
    return stored


def store(
    world: CacheWorld, key: SessionKey, tokens: list[int], *, settle: bool = True
) -> StoreAnswer:
    """Store a whole sequence and let it be hashed; with `settle`, let everything finish."""
    answer = prepare_store(world, key, tokens)
    if answer.lease_id:
        complete_store(world, answer)
    world.finish_all(HashSlots)
    if settle:
        world.quiesce()
    return answer


def prepare_load(
    world: CacheWorld,
    key: SessionKey,
    tokens: list[int],
    from_token: int = 0,
    *,
    dram_only: bool = False,
) -> LoadAnswer:
    answer = world.engine.loads.prepare(
        key, to_bytes(tokens), from_token, ENGINE_ID, dram_only=dram_only
    )
    world.pump()
    return answer


def load(world: CacheWorld, key: SessionKey, tokens: list[int], from_token: int = 0) -> LoadAnswer:
    """Load and complete; return the settled answer."""
    answer = prepare_load(world, key, tokens, from_token)
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.loads.settle(answer.lease_id)
    if answer.lookup is Lookup.HIT:
        world.engine.loads.complete(answer.lease_id, ENGINE_ID)
    world.pump()
    return answer


def world_with_a_on_ssd(num_slots: int = 2):
    """Make a world in which A has two blocks on SSD only; B fills the arena and is clean."""
    world = new_world(num_slots=num_slots)
    store(world, A, ONES + TWOS)
    store(world, B, THREES * num_slots)
    return world


def infos(engine: CacheEngine) -> list[SessionInfo]:
    """Return every session as operators see it, in any order."""
    return engine.inspection.infos(engine.inspection.keys(), EVERYTHING)


def tiers_of(world: CacheWorld, key: SessionKey) -> list[str]:
    """Return where each block of a session is: "D", "S", "DS"."""
    names = {Tier.DRAM: "D", Tier.SSD: "S"}
    return [
        "".join(names[tier] for tier in b.tiers)
        for b in world.engine.inspection.describe(key).blocks
    ]


def counter(world: CacheWorld, name: str) -> int:
    return world.engine.inspection.stats().counters[name]


def store_named(world: CacheWorld, key: SessionKey, tokens: list[int], lineage: Lineage) -> None:
    """Store a sequence with a named lineage."""
    answer = world.engine.stores.prepare(key, to_bytes(tokens), 0, ENGINE_ID, lineage=lineage)
    for block in answer.blocks:
        world.slots[block.slot_id] = compute([0], tokens)[1:][block.token_offset :][
            : block.num_tokens
        ]
    if answer.lease_id:
        complete_store(world, answer)
    world.quiesce()


def spans_of_a(world: CacheWorld) -> list[Span]:
    """Return the first session's spans in the index, after it has taken everything."""
    world.commit(len(world.index.uncommitted))
    return unpack_spans(world.index.sessions[A].spans)


def keys_of(world: CacheWorld, key: SessionKey) -> list[bytes]:
    return [block.key for block in world.engine.inspection.describe(key).blocks]


def wait(world: CacheWorld, elapsed_ns: int) -> None:
    """Let time pass, and run what is due then."""
    world.now_ns += elapsed_ns
    world.engine.expire()
    world.pump()


def restart_committed(world: CacheWorld) -> CacheEngine:
    """Start a new kvd after everything was committed."""
    world.quiesce()
    world.start()
    return world.engine
