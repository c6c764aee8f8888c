"""Requests at once: so many, and no more, for each may hold a body.

One whose body has not come may lose its place: when all are taken, and more than half of them wait
for bodies of one client, a request of another client takes that of the oldest of these. So whoever
sends headers and then nothing, again and again, leaves places for everybody else, and whoever sends
many whole requests at once has as many places as there are.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from inference_svc.openai.errors import SlowRequestError, TooManyRequestsError
from inference_svc.openai.requests import Body, read_body
from inference_svc.openai_settings import OpenAISettings
from shared.access.identity import current_identity

RETRY_S = 1.0  # after a refusal


@dataclass(eq=False)
class _Place:
    """Of one request.

    Attributes:
        request_id: Python's, of the request.
        client: its name.
        wait: for its body, meanwhile.
        is_lost: to a request of somebody else.
    """

    request_id: int
    client: str
    wait: asyncio.Timeout | None = None
    is_lost: bool = False


class RequestPlaces:
    """See the module docstring.

    Args:
        settings: of the API.
    """

    def __init__(self, settings: OpenAISettings) -> None:
        self._most = settings.max_requests
        self._body_s = settings.body_s
        self._taken: dict[int, _Place] = {}  # by request_id
        # By client, of which there are as many as the settings name; the oldest first.
        self._unread: defaultdict[str, OrderedDict[_Place, None]] = defaultdict(OrderedDict)

    @contextmanager
    def taken(self, request: web.Request) -> Iterator[None]:
        """Hold a place for a request of the current client.

        Raises:
            TooManyRequestsError: there is none.
        """
        place = _Place(id(request), current_identity().name)
        if len(self._taken) >= self._most:
            self._take_unread(place.client)
        self._taken[place.request_id] = place
        try:
            yield
        finally:
            self._taken.pop(place.request_id, None)

    async def read(self, request: web.Request) -> Body:
        """Wait for the body of a request that has a place, and decode it.

        Raises:
            TooManyRequestsError: its place was needed before the body came.
            SlowRequestError: it does not come.
            RequestError: as of `read_body`.
        """
        place = self._taken[id(request)]
        unread = self._unread[place.client]
        unread[place] = None
        try:
            async with asyncio.timeout(self._body_s) as place.wait:
                return await read_body(request)
        except TimeoutError as error:
            if place.is_lost:
                raise self._full(
                    f", most of them of {place.client}, whose bodies have not come",
                    "send each with its request",
                ) from error
            raise SlowRequestError(
                f"the body did not come within {self._body_s:g} s", "send it at once"
            ) from error
        finally:
            unread.pop(place, None)

    def _take_unread(self, client: str) -> None:
        """Free the place of a request whose body has not come.

        Raises:
            TooManyRequestsError: it has to keep it.
        """
        most = max(self._unread, key=lambda name: len(self._unread[name]), default=client)
        if most == client or len(self._unread[most]) <= self._most // 2:
            raise self._full("", "come back")
        place, _ = self._unread[most].popitem(last=False)
        place.is_lost = True
        del self._taken[place.request_id]
        assert place.wait is not None, "what is unread is waited for"  # noqa: S101
        if not place.wait.expired():
            place.wait.reschedule(asyncio.get_running_loop().time())

    def _full(self, whose: str, remedy: str) -> TooManyRequestsError:
        message = f"{self._most} requests are under way{whose}"
        return TooManyRequestsError(message, remedy, retry_after_s=RETRY_S)
