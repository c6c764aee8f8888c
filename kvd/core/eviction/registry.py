"""The policies by name. Pure."""

from collections.abc import Callable

from kvd.core.eviction.fifo import FifoPolicy
from kvd.core.eviction.lookahead import LookaheadPolicy
from kvd.core.eviction.lookahead_queue import LookaheadQueuePolicy
from kvd.core.eviction.lru import LruPolicy
from kvd.core.eviction.policy import EvictionPolicy, PolicyContext
from kvd.core.eviction.predictive import PredictivePolicy

_POLICIES = (FifoPolicy, LruPolicy, LookaheadPolicy, LookaheadQueuePolicy, PredictivePolicy)
PolicyMaker = Callable[[PolicyContext], EvictionPolicy]

POLICIES: dict[str, PolicyMaker] = {maker.name: maker for maker in _POLICIES}


def make_policy(name: str, context: PolicyContext) -> EvictionPolicy:
    """Build a policy by its configured name.

    Raises:
        KeyError: for a name outside POLICIES (configuration checks it first).
    """
    return POLICIES[name](context)
