"""A session placement in which letters name queue entries and sessions."""

from collections.abc import Sequence

from kvd.core.eviction.policies import POLICIES
from kvd.core.eviction.session_placement import SessionPlacement
from kvd.core.records.tier import Tier
from shared.types.queue_delta import QueuedRequest, RunningRequest
from shared.types.session_key import SessionKey
from tests.queue_changes import queue_change

ENGINE_ID = 1


def key_of(name: str) -> SessionKey:
    return SessionKey("t", "m", name)


ALWAYS = RunningRequest(999, key_of("always"))


class Sessions:
    """A placement under one policy; tests advance the time."""

    def __init__(self, policy: str, capacity_bytes: int = 0) -> None:
        self.now_ns = 0
        self.capacity_bytes = capacity_bytes
        self.placement = SessionPlacement(POLICIES[policy], lambda: self.capacity_bytes)
        self.policy = self.placement.policy
        self.placement.change_queue(ENGINE_ID, queue_change(running=[ALWAYS]), 0)  # it is known

    def use(self, *names: str) -> None:
        for name in names:
            self.policy.on_access(key_of(name), self.now_ns)

    def queue(self, waiting: Sequence[str], running: Sequence[str] = ()) -> None:
        """Have turns of exactly these sessions wait, in this order, and those run."""
        self.placement.replace_queue(
            ENGINE_ID,
            queue_change(
                [QueuedRequest((0, 0.0, i), key_of(name)) for i, name in enumerate(waiting)],
                [ALWAYS, *(RunningRequest(1000 + i, key_of(x)) for i, x in enumerate(running))],
            ),
            self.now_ns,
        )

    def victims(self, tier: Tier | None = Tier.SSD, giving_way_to: str | None = None) -> str:
        """Return the names of victims, coldest first."""
        than = key_of(giving_way_to) if giving_way_to else None
        found = self.placement.policy.victims(tier, self.now_ns, giving_way_to=than)
        return "".join(key.session_id for key in found)
