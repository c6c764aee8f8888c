"""The other replicas of the deployment, for a request that this one's service refuses.

A service that drains, or has just ended, refuses requests before the routers know: they learn it
from the next report.
"""

from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException


class OtherReplicas:
    """The other replicas of this replica's deployment.

    Args:
        handle: Ray's handle of the deployment.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    async def answer(self, asked: Any, tried: str) -> AsyncIterator[Any]:
        """Yield the parts of another replica's `answer`; nothing if that replica is lost, too.

        Args:
            asked: the request.
            tried: the server that has refused it.
        """
        handle = self._handle.options(session_id=asked.session)
        is_begun = False
        try:
            async for part in handle.remote(asked, tried=(tried,)):
                is_begun = True
                yield part
        except RayError:
            if is_begun:
                raise


def other_replicas() -> OtherReplicas | None:
    """Return the other replicas; None outside of a replica."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return OtherReplicas(serve.get_deployment_handle(context.deployment, context.app_name))
