"""Recent turns as protobuf messages, and back. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from kvd.core.records.records import Tier, TierStats
from kvd.core.state.turn_log import MAX_TURNS, RecordedTurn
from shared.pb.kvd.v1 import kvd_pb2
from shared.types.kv_layout import KVLayout
from shared.types.units import NS_PER_S

TURNS_PER_MESSAGE = 512  # encoded in a few milliseconds, in which nothing else is done


def recent_turns_messages(
    turns: Iterable[RecordedTurn],
    layout: KVLayout,
    tiers: Sequence[TierStats],
    policy: str,
    ttl_s: float | None,
    now_ns: int,
) -> Iterator[kvd_pb2.RecentTurns]:
    """Encode, in messages of bounded size, each as it is asked for.

    Instants become durations from now (D17).
    """
    capacity_bytes = {tier.tier: tier.capacity_bytes for tier in tiers}
    head = kvd_pb2.RecentTurns(
        layout=layout.fingerprint,
        model=layout.model,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        dram_bytes=capacity_bytes[Tier.DRAM],
        ssd_bytes=capacity_bytes[Tier.SSD],
        policy=policy,
        ttl_s=ttl_s or 0.0,
        max_turns=MAX_TURNS,
    )
    rest = iter(turns)
    part = list(islice(rest, TURNS_PER_MESSAGE))
    while True:
        message = kvd_pb2.RecentTurns(turns=[_turn_message(turn, now_ns) for turn in part])
        message.MergeFrom(head)
        yield message
        part = list(islice(rest, TURNS_PER_MESSAGE))
        if not part:
            return


def recorded_turns(messages: Sequence[kvd_pb2.RecentTurn]) -> list[RecordedTurn]:
    """Decode; instants count from the oldest of them."""
    oldest_s = max((message.arrived_s for message in messages), default=0.0)
    return [_recorded_turn(message, oldest_s) for message in messages]


def _turn_message(turn: RecordedTurn, now_ns: int) -> kvd_pb2.RecentTurn:
    return kvd_pb2.RecentTurn(
        session=turn.session,
        turn=turn.turn,
        arrived_s=(now_ns - turn.arrived_ns) / NS_PER_S,
        started_s=(now_ns - turn.started_ns) / NS_PER_S,
        ended_s=(now_ns - turn.ended_ns) / NS_PER_S,
        wanted_tokens=turn.wanted_tokens,
        dram_tokens=turn.dram_tokens,
        ssd_tokens=turn.ssd_tokens,
        stored_tokens=turn.stored_tokens,
        asked=turn.is_asked,
        ended=turn.is_ended,
    )


def _recorded_turn(message: kvd_pb2.RecentTurn, oldest_s: float) -> RecordedTurn:
    def instant_ns(ago_s: float) -> int:
        return round((oldest_s - ago_s) * NS_PER_S)

    return RecordedTurn(
        session=message.session,
        turn=message.turn,
        arrived_ns=instant_ns(message.arrived_s),
        started_ns=instant_ns(message.started_s),
        ended_ns=instant_ns(message.ended_s),
        wanted_tokens=message.wanted_tokens,
        dram_tokens=message.dram_tokens,
        ssd_tokens=message.ssd_tokens,
        stored_tokens=message.stored_tokens,
        is_asked=message.asked,
        is_ended=message.ended,
    )
