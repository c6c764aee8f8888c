"""Random turns against the real pair, many at once: cancelled, dropped, late, urgent, forked.

A seed determines everything but the relative speed of the processes; the answers must not depend on
that speed. `play` continues until the counters show that the scene has exercised its aims.
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
NUM_SESSIONS = 9  # live sessions at a time; one that fills its window is replaced by another
ROUNDS = 8  # times the requested number of turns suffice to reach every aim
SHORT_DEADLINES_S = (0.0001, 0.01, 0.05, 0.2)


class MixedLoad:
    """Drives one pair with a seeded random source.

    Attributes: seen: the fates of turns as their clients saw them, and reused tokens by tier.
    """

    def __init__(self, pair: Pair, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._pair = pair
        self._random = random.Random(seed)  # noqa: S311  # test data
        # some sessions have an equal beginning: they share a block
        self._beginning = self._tokens(140)
        self._generation: Counter[int] = Counter()
        self._begun: set[str] = set()
        self._answers: dict[str, list[int]] = {}  # by request id
        self._num_begun = 0
        self._begins = asyncio.Semaphore(0)  # one entry for each turn begun since kvd's last start

    async def play(self, num_turns: int, aims: Sequence[str] = (), num_kills: int = 0) -> None:
        """Run turns of several clients at once.

        Args:
            num_turns: the minimum; then turns until every aim is reached.
            aims: events that have to happen: keys of `counts`.
            num_kills: how often kvd is killed in between.
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
        """Return what the clients saw and what the service counted."""
        return self.seen + Counter(await self._pair.counters())

    async def judge(self, oracle: Oracle) -> dict[str, Verdict]:
        """Return the sessions whose answers differ from recomputation or from what was streamed."""
        wrong = {}
        async with self._pair.service.client() as client:
            for name in sorted(self._begun):
                with suppress(NotFoundError):  # no turn of this session was finished
                    session = await client.get_session(self._pair.name(name), with_turns=True)
                    verdict = await self._verdict(oracle, name, session.turn_records)
                    if not verdict.is_identical:
                        wrong[name] = verdict
        return wrong

    async def _verdict(
        self, oracle: Oracle, name: str, records: Sequence[pb.TurnRecord]
    ) -> Verdict:
        """Judge a session; the streamed tokens must equal the recorded ones."""
        for record in records:
            streamed = self._answers.get(record.request_id, record.output_ids)
            assert list(streamed) == list(record.output_ids), (name, record.turn)
        verdict = await asyncio.to_thread(oracle.judge, _judged_turns(records))
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
        """Run a turn, a fork, the end of a session, or a pause."""
        die = self._random.random()
        if die < 0.05:
            await self._fork(client)
        elif die < 0.07:
            await self._delete(client)
        elif die < 0.15:
            for _ in range(self._random.randint(1, 20)):
                await client.get_model()  # a pause as long as several answers take
        else:
            await self._turn(client, self._some_session())

    async def _turn(self, client: InferenceClient, name: str) -> None:
        """Submit a turn, and follow it to its end or not."""
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
            if error.reason in ("cancelled", "session_busy"):  # busy: another client is deleting it
                self.seen[error.reason] += 1
            elif error.reason in ("input_too_long", "session_ended"):
                self._retire(name)
            else:
                raise

    async def _finish(self, client: InferenceClient, request: pb.SubmitTurnRequest) -> None:
        """Run a turn to its end, unless another client cancels it."""
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
        """Follow a turn for some of its events, then interrupt it."""
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
        """Cancel the session's turns, those of other clients too; follow the stream to its end."""
        with suppress(NotFoundError):  # the turn has ended already
            self.seen["asked_to_stop"] += await client.cancel(session_id)
        return False

    async def _fork(self, client: InferenceClient) -> None:
        """Fork a session at a random turn; the fork gets a turn or two of its own."""
        if not self._begun:
            return
        name, fork = self._random.choice(sorted(self._begun)), f"fork{self._num_begun}"
        with suppress(NotFoundError):
            turns = (await client.get_session(self._pair.name(name))).turns
            # a session with an empty transcript is not found
            at_turn = self._random.randint(1, turns)
            await client.fork_session(self._pair.name(name), at_turn, self._pair.name(fork))
            self.seen["forks"] += 1
            for _ in range(self._random.randint(1, 2)):
                await self._turn(client, fork)

    async def _delete(self, client: InferenceClient) -> None:
        """Delete a session unless it has a running turn; it may begin again later."""
        with suppress(NotFoundError, ConflictError):
            await client.delete_session(self._pair.name(self._some_session()))
            self.seen["deleted"] += 1

    async def _kill_kvd(self, num_kills: int, num_turns: int) -> None:
        """Kill kvd after every so many turns, and start a new one."""
        for _ in range(num_kills):
            self._begins = asyncio.Semaphore(0)
            for _ in range(num_turns):
                await self._begins.acquire()
            await self._pair.kvd.kill()
            await self._pair.until_kvd_is("detached")
            await self._pair.kvd.start()
            await self._pair.until_kvd_is("attached")
            self.seen["kills"] += 1

    # ----------------------------------------------------------------------------- requests

    def _some_session(self) -> str:
        number = self._random.randrange(NUM_SESSIONS)
        return f"s{number}.{self._generation[number]}"

    def _retire(self, name: str) -> None:
        """Replace a session that is full or has ended; the first client that sees it does so."""
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


def _judged_turns(records: Sequence[pb.TurnRecord]) -> list[tuple[list[int], list[int]]]:
    """Return the turns for the oracle; take an answer that a stop string cut as given.

    The rest of the token in which the stop string begins is encoded again, as any number of tokens
    that were never sampled.
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
    """Play a scene to its end, judge every session, and return the counts."""
    load = MixedLoad(pair, seed)
    await load.play(num_turns, aims, num_kills)
    await until_settled(pair)
    wrong = await load.judge(oracle)
    counts = await load.counts()
    assert not wrong, (wrong, counts)
    assert counts["judged_tokens"] > num_turns
    # A load that fails midway may fail the step of its batch, and then its own turn's.
    assert counts["steps_failed"] <= 2 * counts["load_failed_late"], counts
    if not num_kills:
        assert not counts["load_errors"] + counts["save_errors"], counts
    return counts
