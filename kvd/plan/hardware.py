"""What is planned for: the model by the bytes of its KV, the machine, what turns cost. Pure.

With it comes how much work a trace is, as a share of one engine's time.

*Source:* the constants of the engine reproduce the paper's own TTFT and GPU hours (CachedAttention
§4.2, LLaMA-13B on two A100): 0.9 s to prefill about 1.8K tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from kvd.plan.kept import MOST_KEPT, Kept
from kvd.plan.trace import Session, Turn, truncated
from shared.types.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model as the planner sees it.

    Attributes:
        kv_bytes_per_token: keys and values of all layers that keep them of all tokens.
        window_tokens: the longest context.
        state_bytes: a state of all recurrent layers; 0: it has none.
        windowed_bytes_per_token: keys and values of layers that keep them of the last tokens only.
        attention_window: of how many; 0: there are no such layers.
    """

    name: str
    kv_bytes_per_token: int
    window_tokens: int
    state_bytes: int = 0
    windowed_bytes_per_token: int = 0
    attention_window: int = 0


# Of the paper's models its own figures (Table 1, §4.1; MB = 10**6), so that its experiments can be
# planned with its numbers: by the models' shapes they are 0.82, 2.62, 0.33 and 0.12 MB. Of the last
# one what model_config.py makes of its config: 72 MiB of a state are recurrent, 2.25 convolutions'.
MODELS = {
    model.name: model
    for model in (
        PlannedModel("llama-13b", 780_000, 4096),
        PlannedModel("llama-65b", 2_500_000, 2048),
        PlannedModel("llama-70b", 310_000, 4096),
        PlannedModel("falcon-40b", 120_000, 2048),
        PlannedModel("mistral-7b", 32 * 2 * 8 * 128 * 2, 32768),  # layers, K and V, heads, size, B
        PlannedModel("qwen3-next-80b", 24_576, 262_144, 77_856_832),
    )
}


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """How long computing takes.

    Attributes:
        slots: turns that run at the same time.
        prefill_s_per_token: seconds for each token of a prompt that is computed.
        decode_step_s: one token of every turn that decodes.
        fixed_s: seconds of every prefill, however short.
    """

    slots: int = 24
    prefill_s_per_token: float = 0.5e-3
    decode_step_s: float = 20e-3
    fixed_s: float = 20e-3

    def scaled(self, factor: float) -> "EngineConstants":
        """Return an engine that takes so many times as long for everything."""
        return replace(
            self,
            prefill_s_per_token=self.prefill_s_per_token * factor,
            decode_step_s=self.decode_step_s * factor,
            fixed_s=self.fixed_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine.

    Attributes:
        hbm_bytes: room for the KV of turns that run; 0: only the slots bound them.
        ssd_bytes_per_s: speed of reads; writes cost no time.
        pcie_bytes_per_s: DRAM to HBM.
    """

    dram_bytes: int
    ssd_bytes: int
    hbm_bytes: int = 0
    ssd_bytes_per_s: float = 5e9
    pcie_bytes_per_s: float = 25e9
    engine: EngineConstants = field(default_factory=EngineConstants)


Charge = Literal["packed", "window"]
TierMode = Literal["inclusive", "exclusive"]
LoadPolicy = Literal["always", "auto", "never"]
Positions = Literal["decoupled", "coupled"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a replay assumes beside the machine.

    Attributes:
        policy: the eviction policy's name, or `belady`.
        charge: "packed": a session takes its bytes; "window": those of a full window.
        window_tokens: the model's window; 0: no bound.
        ttl_s: None: sessions stay.
        watermark: share of DRAM kept free.
        warmup_turns: turns that are not measured.
        load_policy: "auto": load where that pays (`loading_pays`); "never": recompute always (RE).
        end_hints: a session's last turn says that it is the last.
        tool_hints: the engine says which tools an answer calls, and which session another one
            supersedes.
        think_scale: multiplies think times; 0: no thinking.
        state_bytes: of a state; 0: the model has none.
        windowed_bytes_per_token: see `PlannedModel`; so `attention_window`.
    """

    policy: str
    kv_bytes_per_token: float
    charge: Charge = "packed"
    window_tokens: int = 0
    tiers: TierMode = "inclusive"
    ttl_s: float | None = None
    watermark: float = 0.0
    warmup_turns: int = 0
    load_policy: LoadPolicy = "auto"
    end_hints: bool = False
    tool_hints: bool = True
    think_scale: float = 1.0
    state_bytes: int = 0
    windowed_bytes_per_token: float = 0.0
    attention_window: int = 0


class Costs:
    """Bytes and times of turns, by the machine and the options."""

    def __init__(
        self, sessions: Sequence[Session], hardware: Hardware, options: ReplayOptions
    ) -> None:
        self._engine = hardware.engine
        self._pcie_bytes_per_s = hardware.pcie_bytes_per_s
        self._bytes_per_token = options.kv_bytes_per_token
        self._state_bytes = options.state_bytes
        self._windowed_bytes = options.windowed_bytes_per_token
        self._attention_window = options.attention_window
        self._window_tokens = options.window_tokens
        self._is_truncated = bool(options.window_tokens) and keep_to_window(
            sessions, options.window_tokens
        )
        self._window_bytes = (
            most_bytes(options, options.window_tokens) if options.charge == "window" else None
        )

    @property
    def has_parts(self) -> bool:
        """Whether the model has layers that keep something else of tokens than KV of each."""
        return self._state_bytes > 0 or self._attention_window > 0

    def held_bytes(self, num_tokens: int) -> int:
        """Return what an engine holds of so many tokens: KV of all layers, and a state."""
        of_token = self._bytes_per_token + self._windowed_bytes
        return round(num_tokens * of_token) + self._state_bytes

    def loaded_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a load of so many tokens: with the state behind them, or a window."""
        windowed = min(num_tokens, self._attention_window) * self._windowed_bytes
        state = self._state_bytes if num_tokens else 0
        return round(num_tokens * self._bytes_per_token + windowed) + state

    def parts_bytes(self, kept: Kept) -> int:
        """Return the bytes of the states, or windows, that are kept of a session."""
        if self._attention_window:
            return round(kept.num_windowed(self._attention_window) * self._windowed_bytes)
        return len(kept.ends) * self._state_bytes

    def kept_bytes(self, kept: Kept) -> int:
        """Return the bytes of what is kept of a session."""
        return round(kept.num_tokens * self._bytes_per_token) + self.parts_bytes(kept)

    def new_bytes(self, kept: Kept, clean: Kept) -> tuple[int, int]:
        """Return the bytes of tokens and those of parts that are kept now and were not before."""
        tokens = max(0, kept.num_tokens - clean.num_tokens)
        parts = max(0, self.parts_bytes(kept) - self.parts_bytes(clean))
        return round(tokens * self._bytes_per_token), parts

    def charge(self, num_bytes: int) -> int:
        """Return what a session of so many bytes takes of a tier."""
        return num_bytes if self._window_bytes is None else self._window_bytes

    def kept_after(self, turn: Turn, before: Kept) -> Kept:
        """Return what is stored after a turn, of whose prompt so much was kept before it."""
        num_tokens = turn.kept_tokens
        if self._is_truncated:
            num_tokens = truncated(num_tokens, 0, self._window_tokens)
        if self._attention_window:
            return before.with_windows(turn, num_tokens)
        return before.with_states(turn, num_tokens) if self._state_bytes else Kept(num_tokens)

    def loadable(self, kept: Kept) -> int:
        """Return how many of the tokens that are kept can be loaded.

        Those before the last state, if the model has states, or before a window that is kept.
        """
        if self._attention_window:
            return kept.last_window_end(self._attention_window)
        if self._state_bytes:
            return kept.ends[-1] if kept.ends else 0
        return kept.num_tokens

    def compute_ns(self, num_tokens: int) -> int:
        """Prefill of so many tokens, without what every prefill takes."""
        return _ns(num_tokens * self._engine.prefill_s_per_token)

    def load_ns(self, num_tokens: int) -> int:
        """Return the time from DRAM to HBM of a load of so many tokens."""
        return _ns(self.loaded_bytes(num_tokens) / self._pcie_bytes_per_s)

    def prefill_ns(self, turn: Turn, loaded_tokens: int) -> int:
        """Prefill of a turn of which so much history is loaded meanwhile."""
        compute_ns = self._computed_ns(turn, loaded_tokens)
        return max(compute_ns, self.load_ns(loaded_tokens))

    def stall_ns(self, turn: Turn, loaded_tokens: int) -> int:
        """Return how much of that prefill only waits for so much history from DRAM."""
        compute_ns = self._computed_ns(turn, loaded_tokens)
        return max(0, self.load_ns(loaded_tokens) - compute_ns)

    def decode_ns(self, turn: Turn) -> int:
        """Decode of a turn, while nothing is prefilled."""
        return _ns(turn.output_tokens * self._engine.decode_step_s)

    def _computed_ns(self, turn: Turn, loaded_tokens: int) -> int:
        num_computed = turn.history_tokens + turn.new_tokens - loaded_tokens
        return _ns(self._engine.fixed_s) + self.compute_ns(num_computed)


def most_bytes(model: PlannedModel | ReplayOptions, num_tokens: int) -> int:
    """Return the most bytes that are kept of a session of so many tokens."""
    num_windowed = min(num_tokens, MOST_KEPT * model.attention_window)
    of_tokens = num_tokens * model.kv_bytes_per_token
    of_tokens += num_windowed * model.windowed_bytes_per_token
    return round(of_tokens) + MOST_KEPT * model.state_bytes


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def keep_to_window(sessions: Sequence[Session], window_tokens: int) -> bool:
    """Whether the trace is of a model with such a window: only then is it truncated to it."""
    return all(
        turn.history_tokens + turn.new_tokens <= window_tokens
        for session in sessions
        for turn in session.turns
    )


STRAY_SHARE = 0.01  # of the sessions, at either end, that may come long before or after the others


def recompute_load(sessions: Sequence[Session], engine: EngineConstants) -> float:
    """Return the engine time per second of arrivals without any load; above 1 queues grow.

    How long the arrivals take is computed from all but the first and the last hundredth of the
    sessions: a few stray ones would make a trace look idle. 0 if they all come at once.
    """
    starts = sorted(session.start_s for session in sessions)
    num_stray = int(len(starts) * STRAY_SHARE)
    span_s = starts[-1 - num_stray] - starts[num_stray]
    if not span_s:
        return 0.0
    span_s *= (len(starts) - 1) / (len(starts) - 1 - 2 * num_stray)
    work_s = sum(_recompute_s(turn, engine) for session in sessions for turn in session.turns)
    return work_s / span_s


def engine_at_load(
    sessions: Sequence[Session], engine: EngineConstants, load: float
) -> EngineConstants:
    """Return an engine so much faster or slower that the sessions are that much work for it.

    Arrivals and think times stay what they are: drawn apart, sessions would no longer overlap. An
    engine for sessions that come all at once is the one given.
    """
    return engine.scaled(load / (recompute_load(sessions, engine) or load))


def _recompute_s(turn: Turn, engine: EngineConstants) -> float:
    """Return the seconds that recomputing takes; a decode's share of the engine is its slot's."""
    return (
        engine.fixed_s
        + (turn.history_tokens + turn.new_tokens) * engine.prefill_s_per_token
        + turn.output_tokens * engine.decode_step_s / engine.slots
    )
