"""The other replicas, for a request that this one's service does not take.

A service that drains, or has just gone, refuses requests before routers know: they hear of it with
the next report.
"""

from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException


class OtherReplicas:
    """The deployment that this replica is of.

    Args:
        handle: of the deployment.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(method_name="answer", stream=True)

    async def answer(self, asked: Any, tried: str) -> AsyncIterator[Any]:
        """Yield what another replica's `answer` does; nothing, if that one is lost as well.

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
    """Find the other replicas; None: this is none."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return OtherReplicas(serve.get_deployment_handle(context.deployment, context.app_name))
