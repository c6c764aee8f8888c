"""A session placement whose queue and sessions are named by letters."""

from collections.abc import Sequence

from kvd.core.eviction.queue_window import QueueChange, QueuedRequest, RunningRequest
from kvd.core.eviction.registry import make_policy
from kvd.core.records.records import Tier
from kvd.core.state.session_placement import SessionPlacement
from shared.types.session_key import SessionKey

OWNER = 1


def key_of(name: str) -> SessionKey:
    return SessionKey("t", "m", name)


ALWAYS = RunningRequest(999, key_of("always"))


class Sessions:
    """A placement under one policy; time passes as it is told."""

    def __init__(self, policy: str, capacity_bytes: int = 0) -> None:
        self.now_ns = 0
        self.capacity_bytes = capacity_bytes
        self.placement = SessionPlacement(
            lambda context: make_policy(policy, context), lambda: self.capacity_bytes
        )
        self.policy = self.placement.policy
        self.placement.change_queue(OWNER, QueueChange(running=[ALWAYS]), 0)  # it is known

    def use(self, *names: str) -> None:
        for name in names:
            self.policy.touched(key_of(name), self.now_ns)

    def queue(self, waiting: Sequence[str], running: Sequence[str] = ()) -> None:
        """Have these sessions' turns wait, in this order, and those run; nobody else's."""
        self.placement.replace_queue(
            OWNER,
            QueueChange(
                [QueuedRequest((0, 0.0, i), key_of(name)) for i, name in enumerate(waiting)],
                [ALWAYS, *(RunningRequest(1000 + i, key_of(x)) for i, x in enumerate(running))],
            ),
            self.now_ns,
        )

    def victims(self, tier: Tier | None = Tier.SSD, colder_than: str | None = None) -> str:
        """Names of victims, coldest first."""
        than = key_of(colder_than) if colder_than else None
        found = self.placement.victims(tier, self.now_ns, colder_than=than)
        return "".join(key.session_id for key in found)
