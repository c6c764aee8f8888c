"""SinksRecent: the first tokens and the latest ones stay, whatever is between them goes.

*Source:* StreamingLLM, "Efficient Streaming Language Models with Attention Sinks" (Xiao et al.,
ICLR 2024): models put attention they have no use for on the first tokens, and break without them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from inference_svc.core.compression.policy import Needs, all_but, free_tokens, num_kept
from inference_svc.core.discards import Range


@dataclass(frozen=True)
class SinksRecent:
    """See the module docstring.

    Attributes:
        sink_tokens: first positions of the context that stay before any other; those that are
            protected count.
    """

    keep_ratio: float
    sink_tokens: int = 4

    name: ClassVar[str] = "sinks_recent"
    needs: ClassVar[Needs] = "nothing"
    window_tokens: ClassVar[int] = 0

    def drop(
        self, num_tokens: int, _scores: Sequence[float] | None, protected: Iterable[Range]
    ) -> tuple[Range, ...]:
        """See the protocol."""
        free = free_tokens(num_tokens, protected)
        budget = num_kept(self.keep_ratio, len(free))
        sinks = [position for position in free if position < self.sink_tokens][:budget]
        kept = sinks + free[len(free) - (budget - len(sinks)) :]
        return all_but(kept, free, num_tokens)
