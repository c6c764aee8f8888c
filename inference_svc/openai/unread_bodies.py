"""Bodies that have not come yet: those of one client take half of the places at most.

Whoever sends headers and then nothing, again and again, leaves places for everybody else.
"""

from collections import Counter

from aiohttp import web

from inference_svc.openai.errors import TooManyRequestsError
from inference_svc.openai.requests import Body, read_body
from inference_svc.openai.settings import OpenAISettings
from shared.access.current import current_identity

RETRY_S = 1.0


class UnreadBodies:
    """See the module docstring.

    Args:
        settings: of the API.
    """

    def __init__(self, settings: OpenAISettings) -> None:
        self._most = max(1, settings.max_requests // 2)
        self._body_s = settings.body_s
        self._unread: Counter[str] = Counter()  # by client

    async def read(self, request: web.Request) -> Body:
        """Wait for a request's body, and decode it.

        Raises:
            TooManyRequestsError: too many of this client are waited for.
            RequestError: as of `read_body`.
        """
        name = current_identity().name
        if self._unread[name] >= self._most:
            raise TooManyRequestsError(
                f"{self._most} bodies of {name} have not come",
                "send each with its request",
                retry_after_s=RETRY_S,
            )
        self._unread[name] += 1
        try:
            return await read_body(request, self._body_s)
        finally:
            self._unread[name] -= 1
            if not self._unread[name]:
                del self._unread[name]
