"""Random turns against the real pair, many at once: cancelled, dropped, late, urgent, forked.

Everything is drawn from a seed but the order in which processes get on; what comes out must not
depend on that. `play` goes on until the counters show that what the scene is for has happened.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from inference_svc.client import InferenceClient, turn_request
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.types.errors import ConflictError, DeadlineError, NotFoundError, ReportedError
from tests.mixed_pair import until_settled
from tests.oracle import Oracle, Verdict
from tests.pair import VOCAB_SIZE, Pair

NUM_CLIENTS = 7
NUM_SESSIONS = 9  # alive at a time; one that fills the window is followed by another
ROUNDS = 8  # as many turns as asked for, so many times, is enough to see what is to be seen
SHORT_DEADLINES_S = (0.0001, 0.01, 0.05, 0.2)


class MixedLoad:
    """Drives one pair by a seeded die.

    Attributes:
        seen: what happened to turns, as their clients saw it, and reused tokens by tier.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._pair = pair
        self._random = random.Random(seed)  # noqa: S311  # test data
        self._beginning = self._tokens(140)  # some sessions begin alike: a block is shared
        self._generation: Counter[int] = Counter()
        self._begun: set[str] = set()
        self._answers: dict[str, list[int]] = {}  # by request id
        self._num_begun = 0
        self._begins = asyncio.Semaphore(0)  # one for each turn begun since kvd's last start

    async def play(self, num_turns: int, aims: Sequence[str] = (), num_kills: int = 0) -> None:
        """Take turns with several clients at once.

        Args:
            num_turns: at least; then until every aim is reached.
            aims: what is to happen: keys of `counts`.
            num_kills: of kvd, in between.
        """

        async def take_turns(client: InferenceClient) -> None:
            while self.seen["kills"] < num_kills or not await self._is_enough(num_turns, aims):
                self._num_begun += 1
                self._begins.release()
                await self._something(client)

        async with self._pair.service.client() as client, asyncio.TaskGroup() as clients:
            clients.create_task(self._kill_kvd(num_kills, num_turns // (num_kills + 1)))
            for _ in range(NUM_CLIENTS):
                clients.create_task(take_turns(client))

    async def counts(self) -> Counter[str]:
        """What the clients saw and what the service counted."""
        return self.seen + Counter(await self._pair.counters())

    async def judge(self, oracle: Oracle) -> dict[str, Verdict]:
        """Sessions with answers that are not those of recomputation, or not what was streamed."""
        wrong = {}
        async with self._pair.service.client() as client:
            for name in sorted(self._begun):
                with suppress(NotFoundError):  # none of its turns was finished
                    session = await client.get_session(self._pair.name(name), with_turns=True)
                    verdict = await self._verdict(oracle, name, session.turn_records)
                    if not verdict.is_identical:
                        wrong[name] = verdict
        return wrong

    async def _verdict(
        self, oracle: Oracle, name: str, records: Sequence[pb.TurnRecord]
    ) -> Verdict:
        """Judge a session; what was streamed has to be what is recorded, too."""
        for record in records:
            streamed = self._answers.get(record.request_id, record.output_ids)
            assert list(streamed) == list(record.output_ids), (name, record.turn)
        verdict = await asyncio.to_thread(oracle.judge, _judged(records))
        self.seen["judged_tokens"] += verdict.num_tokens
        self.seen["ties"] += verdict.num_ties
        return verdict

    # ----------------------------------------------------------------------------- the dice

    async def _is_enough(self, num_turns: int, aims: Sequence[str]) -> bool:
        if self._num_begun < num_turns:
            return False
        counts = await self.counts()
        missing = [aim for aim in aims if not counts[aim]]
        assert not missing or self._num_begun < ROUNDS * num_turns, f"never seen: {missing}"
        return not missing

    async def _something(self, client: InferenceClient) -> None:
        """A turn, a fork, the end of a session, or a pause."""
        die = self._random.random()
        if die < 0.05:
            await self._fork(client)
        elif die < 0.07:
            await self._delete(client)
        elif die < 0.15:
            for _ in range(self._random.randint(1, 20)):
                await client.get_model()  # a pause as long as so many answers take
        else:
            await self._turn(client, self._some_session())

    async def _turn(self, client: InferenceClient, name: str) -> None:
        """Submit a turn, to its end or not."""
        request, die = self._request(name), self._random.random()
        self._begun.add(name)
        try:
            if die < 0.1:
                await self._follow(client, request, self._leave)
            elif die < 0.2:
                await self._follow(client, request, self._cancel)
            else:
                if die < 0.3:
                    request.deadline_s = self._random.choice(SHORT_DEADLINES_S)
                await self._finish(client, request)
        except DeadlineError:
            assert request.deadline_s
            self.seen["late"] += 1
        except ReportedError as error:
            if error.reason in ("cancelled", "session_busy"):  # busy: it is being deleted
                self.seen[error.reason] += 1
            elif error.reason in ("input_too_long", "session_ended"):
                self._retire(name)
            else:
                raise

    async def _finish(self, client: InferenceClient, request: pb.SubmitTurnRequest) -> None:
        """Run a turn to its end, unless it is cancelled by others."""
        result = await client.submit(request)
        self.seen[result.finished.finish_reason] += 1
        if result.finished.finish_reason == "cancelled":
            return
        usage = result.usage
        assert usage.reused_tokens + usage.recomputed_tokens == usage.history_tokens
        assert sum(usage.tier_tokens.values()) == usage.reused_tokens
        self.seen.update(usage.tier_tokens)
        self._answers[result.accepted.request_id] = result.token_ids

    async def _follow(
        self,
        client: InferenceClient,
        request: pb.SubmitTurnRequest,
        then: Callable[[InferenceClient, str], Awaitable[bool]],
    ) -> None:
        """Follow a turn for some of its events, then do something to it."""
        num_left = self._random.choice((1, 1, 2, 2, 3, 8, 20))
        async with aclosing(client.stream_turn(request)) as events:
            async for event in events:
                num_left -= 1
                if not num_left and await then(client, request.session_id):
                    return
                if event.WhichOneof("event") == "finished":
                    self.seen[event.finished.finish_reason] += 1

    async def _leave(self, _client: InferenceClient, _session_id: str) -> bool:
        """Drop the stream."""
        self.seen["left"] += 1
        return True

    async def _cancel(self, client: InferenceClient, session_id: str) -> bool:
        """Cancel what the session has, also other clients' turns; the stream goes on to its end."""
        with suppress(NotFoundError):  # it is over
            self.seen["asked_to_stop"] += await client.cancel(session_id)
        return False

    async def _fork(self, client: InferenceClient) -> None:
        """Fork a session somewhere in its life; the fork has a turn or two of its own."""
        if not self._begun:
            return
        name, fork = self._random.choice(sorted(self._begun)), f"fork{self._num_begun}"
        with suppress(NotFoundError):
            turns = (await client.get_session(self._pair.name(name))).turns
            at_turn = self._random.randint(1, turns)  # an empty transcript is not found
            await client.fork_session(self._pair.name(name), at_turn, self._pair.name(fork))
            self.seen["forks"] += 1
            for _ in range(self._random.randint(1, 2)):
                await self._turn(client, fork)

    async def _delete(self, client: InferenceClient) -> None:
        """Delete a session, unless a turn of it is under way; it may well begin anew."""
        with suppress(NotFoundError, ConflictError):
            await client.delete_session(self._pair.name(self._some_session()))
            self.seen["deleted"] += 1

    async def _kill_kvd(self, num_kills: int, num_turns: int) -> None:
        """SIGKILL in the middle of everything, after so many turns each, and a new one instead."""
        for _ in range(num_kills):
            self._begins = asyncio.Semaphore(0)
            for _ in range(num_turns):
                await self._begins.acquire()
            await self._pair.kvd.kill()
            await self._pair.until_kvd_is("detached")
            await self._pair.kvd.start()
            await self._pair.until_kvd_is("attached")
            self.seen["kills"] += 1

    # ----------------------------------------------------------------------------- what to say

    def _some_session(self) -> str:
        number = self._random.randrange(NUM_SESSIONS)
        return f"s{number}.{self._generation[number]}"

    def _retire(self, name: str) -> None:
        """It is full, or has ended; whoever sees it first opens the next session."""
        if name.startswith("s"):
            number, generation = map(int, name[1:].split("."))
            self._generation[number] = max(self._generation[number], generation + 1)

    def _request(self, name: str) -> pb.SubmitTurnRequest:
        token_ids = self._tokens(self._random.choice((1, 8, 30, 60, 120, 200)))
        if name not in self._begun and self._random.random() < 0.4:
            token_ids = self._beginning + token_ids
        sampling = pb.Sampling(
            max_tokens=self._random.choice((1, 2, 5, 10, 20, 40, 90)), ignore_eos=True
        )
        if self._random.random() < 0.1:
            sampling.stop.append(self._random.choice("aeinot"))
        return turn_request(
            token_ids,
            self._pair.name(name),
            sampling=sampling,
            priority=self._random.choice((-2, 0, 0, 0, 0, 1, 5)),
            wait=True,
            final=self._random.random() < 0.03,
        )

    def _tokens(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(4, VOCAB_SIZE) for _ in range(num_tokens)]


def _judged(records: Sequence[pb.TurnRecord]) -> list[tuple[list[int], list[int]]]:
    """Turns for the oracle; an answer that a stop string cut is taken as given.

    What is left of the token that the string begins in is encoded anew, as any number of tokens
    that nobody has sampled.
    """
    turns = []
    for record in records:
        token_ids = [*record.input_ids, *record.output_ids]
        num_given = len(token_ids if record.finish_reason == "stop" else record.input_ids)
        turns.append((token_ids[:num_given], token_ids[num_given:]))
    return turns


async def play(
    pair: Pair, oracle: Oracle, seed: int, num_turns: int, aims: Sequence[str], num_kills: int = 0
) -> Counter[str]:
    """Play a scene to its end, judge all of it, and return what happened."""
    load = MixedLoad(pair, seed)
    await load.play(num_turns, aims, num_kills)
    await until_settled(pair)
    wrong = await load.judge(oracle)
    counts = await load.counts()
    assert not wrong, (wrong, counts)
    assert counts["judged_tokens"] > num_turns
    # A load that fails under way costs the step of its batch, and the one of its turn alone.
    assert counts["steps_failed"] <= 2 * counts["load_failed_late"], counts
    if not num_kills:
        assert not counts["load_errors"] + counts["save_errors"], counts
    return counts
