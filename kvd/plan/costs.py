"""Bytes and times of turns, by the machine and the options. Pure."""

from collections.abc import Sequence

from kvd.plan.hardware import Hardware
from kvd.plan.replay_options import ReplayOptions
from kvd.plan.trace import Session, Turn, truncated
from shared.types.units import NS_PER_S


class Costs:
    """See the module docstring."""

    def __init__(
        self, sessions: Sequence[Session], hardware: Hardware, options: ReplayOptions
    ) -> None:
        self._engine = hardware.engine
        self._pcie_bytes_per_s = hardware.pcie_bytes_per_s
        self._bytes_per_token = options.kv_bytes_per_token
        self._window_tokens = options.window_tokens
        self._is_truncated = _keep_to_window(sessions, options.window_tokens)
        self._window_bytes = (
            self.num_bytes(options.window_tokens) if options.charge == "window" else None
        )

    def num_bytes(self, num_tokens: int) -> int:
        """KV of so many tokens."""
        return round(num_tokens * self._bytes_per_token)

    def num_tokens(self, num_bytes: int) -> int:
        """Tokens of so much KV."""
        return round(num_bytes / self._bytes_per_token)

    def charge(self, num_bytes: int) -> int:
        """What a session of so many bytes takes of a tier."""
        return num_bytes if self._window_bytes is None else self._window_bytes

    def kept_tokens(self, turn: Turn) -> int:
        """What is stored after a turn."""
        if not self._is_truncated:
            return turn.kept_tokens
        return truncated(turn.kept_tokens, 0, self._window_tokens)

    def compute_ns(self, num_tokens: int) -> int:
        """Prefill of so many tokens, without what every prefill takes."""
        return _ns(num_tokens * self._engine.prefill_s_per_token)

    def load_ns(self, num_tokens: int) -> int:
        """DRAM to HBM."""
        return _ns(self.num_bytes(num_tokens) / self._pcie_bytes_per_s)

    def prefill_ns(self, turn: Turn, loaded_tokens: int) -> int:
        """Prefill of a turn of which so much history is loaded meanwhile."""
        num_computed = turn.history_tokens + turn.new_tokens - loaded_tokens
        compute_ns = _ns(self._engine.fixed_s) + self.compute_ns(num_computed)
        return max(compute_ns, self.load_ns(loaded_tokens))

    def decode_ns(self, turn: Turn) -> int:
        """Decode of a turn, while nothing is prefilled."""
        return _ns(turn.output_tokens * self._engine.decode_step_s)


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def _keep_to_window(sessions: Sequence[Session], window_tokens: int) -> bool:
    """Whether the trace is of a model with such a window: only then is it truncated to it."""
    return bool(window_tokens) and all(
        turn.history_tokens + turn.new_tokens <= window_tokens
        for session in sessions
        for turn in session.turns
    )
