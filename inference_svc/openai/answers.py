"""Starts turns for HTTP: finds their place, forks if need be, joins repeats.

Invariants:
    1. two requests with the same history never share a session: one of them gets a fork;
    2. who has the end of an answer finds it remembered, and its session free (`live_answer.py`);
    3. a repeat under an idempotency key goes to the session that the request went to.
"""

import asyncio
import uuid
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from inference_svc.core.errors import (
    RequestIdReusedError,
    SessionBusyError,
    SessionEndedError,
    TooManySessionsError,
    TurnMismatchError,
)
from inference_svc.openai.endings import Endings
from inference_svc.openai.errors import unknown_response
from inference_svc.openai.known import KnownRequest
from inference_svc.openai.live_answer import LiveAnswer
from inference_svc.openai.places import Caller, Place, Places
from inference_svc.openai.remembered import Remembered
from inference_svc.openai.wanted_turn import WantedTurn
from inference_svc.service.gateway import Front

TAKEN = (SessionBusyError, TurnMismatchError, SessionEndedError)  # another turn was there first


class Answers:
    """See the module docstring.

    Args:
        front: of the service.
        remembered: between requests.
        endings: what is done at the end.
    """

    def __init__(self, front: Front, remembered: Remembered, endings: Endings) -> None:
        self._front = front
        self._remembered = remembered
        self._endings = endings
        self._places = Places(front, remembered)
        self._repeats: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()

    async def open(self, caller: Caller, wanted: WantedTurn) -> LiveAnswer:
        """Start a turn and return when it has its first tokens; the caller owes `close`.

        Raises:
            ReportedError: it was refused, or failed before it began.
        """
        if wanted.repeat_key is None:
            return await self._open(caller, wanted)
        lock = self._repeats.setdefault(wanted.repeat_key, asyncio.Lock())
        async with lock:
            known = await self._remembered.find_request(wanted.repeat_key)
            if known is not None and known.body != wanted.body:
                raise RequestIdReusedError(
                    "the Idempotency-Key was used with another body", "make a new key for each turn"
                )
            if known is not None:
                place = Place(
                    known.session_id,
                    known.turns,
                    known.first,
                    known.history,
                    is_named=known.is_named,
                )
                with suppress(*TAKEN):  # its turn was never recorded, and others came after it
                    return await self._start(caller, wanted, place, is_passing=not wanted.is_kept)
            return await self._open(caller, wanted)

    async def _open(self, caller: Caller, wanted: WantedTurn) -> LiveAnswer:
        try:
            return await self._open_once(caller, wanted)
        except TooManySessionsError:
            if not await self._endings.make_room(caller):
                raise
        return await self._open_once(caller, wanted)

    async def _open_once(self, caller: Caller, wanted: WantedTurn) -> LiveAnswer:
        place = await self._find(caller, wanted)
        if place.session_id and place.goes_on and wanted.is_kept:
            try:
                return await self._start(caller, wanted, place, is_passing=False)
            except TAKEN:
                if wanted.session_id:
                    raise
        return await self._open_apart(caller, wanted, place)

    async def _open_apart(self, caller: Caller, wanted: WantedTurn, place: Place) -> LiveAnswer:
        """Answer in a session of its own: a new one, or a fork."""
        session_id = place.name or f"s-{uuid.uuid4().hex}"
        apart = replace(place, session_id=session_id, is_named=bool(place.name))
        if not place.turns:
            if not wanted.is_kept:
                await self._endings.begin_passing(caller, session_id)
            return await self._start(caller, wanted, apart, is_passing=not wanted.is_kept)
        self._front.check_limits(caller.identity, caller.tenant)  # a fork is a file on disk
        await self._endings.begin_passing(caller, session_id)
        try:
            await self._front.fork(
                caller.identity, caller.tenant, place.session_id, place.turns, session_id
            )
        except BaseException:
            self._endings.spawn(self._endings.remove(caller, session_id, place.turns))
            raise
        return await self._start(caller, wanted, apart, is_passing=True)

    async def _find(self, caller: Caller, wanted: WantedTurn) -> Place:
        """Where the turn goes.

        Raises:
            UnknownResponseError: the session of the response that it follows is gone.
        """
        if wanted.previous is None:
            chain = self._endings.chain(caller)
            return await self._places.find(caller, chain, wanted.messages, wanted.session_id)
        place = await self._places.after(caller, wanted.previous.at, wanted.previous.history)
        if place is None:
            raise unknown_response(wanted.facts.previous_id if wanted.facts else "")
        return place

    async def _start(
        self, caller: Caller, wanted: WantedTurn, place: Place, *, is_passing: bool
    ) -> LiveAnswer:
        try:
            if wanted.repeat_key is not None:
                known = KnownRequest(
                    wanted.body,
                    place.session_id,
                    place.turns,
                    place.first,
                    place.history,
                    place.is_named,
                )
                await self._remembered.keep_request(caller.tenant, wanted.repeat_key, known)
            turn = wanted.as_turn(caller, place)
            following = await self._front.submit(caller.identity, turn)
        except BaseException:
            if is_passing:
                turns = place.turns if wanted.is_kept else None
                self._endings.spawn(self._endings.remove(caller, place.session_id, turns))
            raise
        answer = LiveAnswer(self._endings, caller, wanted, place, following, is_passing=is_passing)
        try:
            await answer.until_begun()
        except BaseException:
            answer.close()
            raise
        return answer
