"""Whole loads and stores against a CacheWorld, for tests that are about something else."""

from kvd.core.engine import CacheEngine, Limits
from kvd.core.eviction.queue_window import QueueChange, QueuedRequest
from kvd.core.eviction.registry import POLICIES
from kvd.core.inspection.session_filter import EVERYTHING
from kvd.core.records.actions import HashSlot
from kvd.core.records.records import LoadAnswer, Lookup, SessionInfo, StoreAnswer, Tier
from shared.types.session_key import SessionKey
from tests.property.cache_world import MODEL, CacheWorld, compute, to_bytes

A = SessionKey("a", MODEL, "a")
B = SessionKey("a", MODEL, "b")
C = SessionKey("a", MODEL, "c")
OTHER_TENANT = SessionKey("other", MODEL, "a")
OWNER = 1
ONES, TWOS, THREES = [1] * 4, [2] * 4, [3] * 4  # one block each


def new_world(
    num_slots: int = 16, num_extents: int = 64, policy: str = "lru", **limits
) -> CacheWorld:
    return CacheWorld(Limits(num_slots, num_extents, **limits), POLICIES[policy])


def queue_of(*keys: SessionKey) -> QueueChange:
    """A queue in which a turn of each of these sessions waits, in this order."""
    return QueueChange([QueuedRequest((0, 0.0, number), key) for number, key in enumerate(keys)])


def prepare_store(
    world: CacheWorld, key: SessionKey, tokens: list[int], from_token: int = 0
) -> StoreAnswer:
    """Ask for slots and fill those granted."""
    answer = world.engine.prepare_store(key, to_bytes(tokens), from_token, OWNER, world.now_ns)
    rows = compute([], tokens)
    for block in answer.blocks:
        end = block.token_offset + block.num_tokens
        world.slots[block.slot_id] = rows[block.token_offset : end]
    world.pump()
    return answer


def complete_store(world: CacheWorld, answer: StoreAnswer, *, success: bool = True) -> int:
    stored = world.engine.complete_store(answer.lease_id, OWNER, success, world.now_ns)
    world.pump()
    return stored


def store(
    world: CacheWorld, key: SessionKey, tokens: list[int], *, settle: bool = True
) -> StoreAnswer:
    """Store a whole sequence and let it be hashed; if `settle`, let everything finish."""
    answer = prepare_store(world, key, tokens)
    if answer.lease_id:
        complete_store(world, answer)
    world.finish_all(HashSlot)
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
    answer = world.engine.prepare_load(
        key, to_bytes(tokens), from_token, OWNER, world.now_ns, dram_only=dram_only
    )
    world.pump()
    return answer


def load(world: CacheWorld, key: SessionKey, tokens: list[int], from_token: int = 0) -> LoadAnswer:
    """Load and complete; returns the settled answer."""
    answer = prepare_load(world, key, tokens, from_token)
    if answer.lookup is Lookup.PENDING:
        world.quiesce()
        answer = world.engine.settle_load(answer.lease_id)
    if answer.lookup is Lookup.HIT:
        world.engine.complete_load(answer.lease_id, OWNER, world.now_ns)
    world.pump()
    return answer


def infos(engine: CacheEngine) -> list[SessionInfo]:
    """Every session as operators see it, in no particular order."""
    return engine.session_infos(engine.session_keys(), EVERYTHING, 0)


def tiers_of(world: CacheWorld, key: SessionKey) -> list[str]:
    """Where each block of a session is: "D", "S", "DS"."""
    names = {Tier.DRAM: "D", Tier.SSD: "S"}
    return ["".join(names[tier] for tier in b.tiers) for b in world.engine.describe(key).blocks]


def counter(world: CacheWorld, name: str) -> int:
    return world.engine.stats().counters[name]
