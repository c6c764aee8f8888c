"""The policies by name. Pure."""

from collections.abc import Callable

from kvd.core.eviction.lru import LruPolicy
from kvd.core.eviction.policy import EvictionPolicy, PolicyContext

PolicyMaker = Callable[[PolicyContext], EvictionPolicy]

POLICIES: dict[str, PolicyMaker] = {"lru": LruPolicy}


def make_policy(name: str, context: PolicyContext) -> EvictionPolicy:
    """Build a policy by its configured name.

    Raises:
        KeyError: for a name outside POLICIES (configuration checks it first).
    """
    return POLICIES[name](context)
