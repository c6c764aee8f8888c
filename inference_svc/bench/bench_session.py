"""A session whose history stays as it is, however often a turn of it is measured."""

from inference_svc.bench.interleaved import Interleaved
from inference_svc.bench.local_engine import LocalEngine
from inference_svc.bench.turn_times import Source, TurnTimes, is_from
from shared.types.session_key import SessionKey

ATTEMPTS = 3  # at a measurement whose history was not where it should have been


class BenchSession:
    """See the module docstring.

    Every measured turn brings new random tokens, and leaves kvd and the resident sequence with the
    history alone, which is whole blocks (see turn_times.whole_blocks).

    Attributes:
        ids: of the history.
    """

    def __init__(self, engine: LocalEngine, name: str, ids: list[int] | None = None) -> None:
        self.ids = ids or []
        self._engine = engine
        self._name = name

    @property
    def key(self) -> SessionKey:
        """Of the session."""
        return self._engine.key(self._name)

    def on(self, engine: LocalEngine) -> "BenchSession":
        """The same session on another engine of the same kvd."""
        return BenchSession(engine, self._name, self.ids)

    async def grow(self, num_tokens: int) -> None:
        """Make the history that long; what is new of it is computed and saved."""
        missing = num_tokens - len(self.ids)
        if missing > 0:
            self.ids += self._engine.new_tokens(missing)
            await self._engine.turn(self.key, self.ids, 1, source="any", keep_tokens=num_tokens)
            await self._engine.settle()

    async def turn(self, source: Source, num_new: int, num_answer: int) -> TurnTimes:
        """A turn of so many new tokens."""
        return await self._engine.turn(
            self.key,
            [*self.ids, *self._engine.new_tokens(num_new)],
            num_answer,
            source=source,
            keep_tokens=len(self.ids),
        )

    def is_from(self, times: TurnTimes, tier: str) -> bool:
        """Whether a turn had its history from there; see turn_times.is_from."""
        return is_from(times, tier, len(self.ids))


def in_turn(names: list[str], round_number: int) -> list[str]:
    """The variants of a round: every round begins with another, so that none has a fixed place."""
    first = round_number % len(names)
    return names[first:] + names[:first]


def ttft_values(times: TurnTimes, num_prompt: int) -> dict[str, float]:
    """Metrics of a turn; prefill throughput as the paper counts it: the history counts."""
    values = {"ttft_s": times.ttft_s, "prefill_tokens_per_s": num_prompt / times.ttft_s}
    return values | ({"tpot_s": times.tpot_s} if times.tpot_s else {})


def note(found: Interleaved, variant: str, round_number: int, values: dict[str, float]) -> None:
    """Add a measurement, unless the round is one of those before the first, which warm up."""
    if round_number >= 0:
        found.add(variant, round_number, values)
