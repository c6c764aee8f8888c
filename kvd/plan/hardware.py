"""The model, the machine and the costs of turns that a plan assumes; and the load of a trace. Pure.

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
    """A model, as the planner needs it.

    Attributes:
        name: its name, for reports.
        kv_bytes_per_token: keys and values of all layers that keep them of all tokens.
        window_tokens: the longest context.
        state_bytes: a state of all recurrent layers; 0: it has none.
        windowed_bytes_per_token: keys and values of layers that keep them of the last tokens only.
        attention_window: the number of these tokens; 0: there are no such layers.
    """

    name: str
    kv_bytes_per_token: int
    window_tokens: int
    state_bytes: int = 0
    windowed_bytes_per_token: int = 0
    attention_window: int = 0


# The paper's models have the paper's figures (Table 1, §4.1; MB = 10**6), so that its experiments
# can be planned with its numbers; the models' shapes give 0.82, 2.62, 0.33 and 0.12 MB. The last
# model's sizes are those that model_config.py computes: of a state, 72 MiB are recurrent and 2.25
# MiB convolutions.
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
    """The times of computing.

    Attributes:
        slots: turns that run at the same time.
        prefill_s_per_token: seconds of a prefill per token that is computed.
        decode_step_s: seconds of a step, which decodes one token of every turn.
        fixed_s: seconds of every prefill, however short.
    """

    slots: int = 24
    prefill_s_per_token: float = 0.5e-3
    decode_step_s: float = 20e-3
    fixed_s: float = 20e-3

    def scaled(self, factor: float) -> "EngineConstants":
        """Return an engine that takes `factor` times as long for everything."""
        return replace(
            self,
            prefill_s_per_token=self.prefill_s_per_token * factor,
            decode_step_s=self.decode_step_s * factor,
            fixed_s=self.fixed_s * factor,
        )


@dataclass(frozen=True, slots=True)
class Hardware:
    """A server's tiers and speeds.

    Attributes:
        dram_bytes, ssd_bytes: sizes of the tiers.
        hbm_bytes: room for the KV of turns that run; 0: only the slots limit them.
        ssd_bytes_per_s: bandwidth of reads; writes cost no time.
        pcie_bytes_per_s: bandwidth from DRAM to HBM.
        engine: the times of computing.
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
    """Assumptions of a replay about kvd, the engine and clients.

    Attributes:
        policy: the eviction policy's name, or `belady`.
        kv_bytes_per_token: see PlannedModel.
        charge: "packed": a session takes its bytes of a tier; "window": those of a full window.
        window_tokens: the model's window; 0: no limit.
        tiers: "inclusive": SSD keeps what DRAM has; "exclusive": it does not.
        ttl_s: seconds that a session is kept; None: for ever.
        watermark: share of DRAM kept free.
        warmup_turns: first turns, which are not measured.
        load_policy: "auto": load where that pays (`loading_pays`); "never": always recompute (RE).
        end_hints: a session's last turn is marked as the last.
        tool_hints: the engine reports the tools that an answer calls, and sessions that supersede
            another one.
        think_scale: factor of think times; 0: users do not think.
        state_bytes: bytes of a state; 0: the model has none.
        windowed_bytes_per_token, attention_window: see PlannedModel.
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
    """The bytes and times of turns, for one machine and its options."""

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
        """Whether the model keeps states or windows."""
        return self._state_bytes > 0 or self._attention_window > 0

    def held_bytes(self, num_tokens: int) -> int:
        """Return the bytes of HBM for so many tokens: KV of all layers, and a state."""
        of_token = self._bytes_per_token + self._windowed_bytes
        return round(num_tokens * of_token) + self._state_bytes

    def loaded_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a load of so many tokens, with a state or a window."""
        windowed = min(num_tokens, self._attention_window) * self._windowed_bytes
        state = self._state_bytes if num_tokens else 0
        return round(num_tokens * self._bytes_per_token + windowed) + state

    def parts_bytes(self, kept: Kept) -> int:
        """Return the bytes of the states or windows that are kept of a session."""
        if self._attention_window:
            return round(kept.num_windowed(self._attention_window) * self._windowed_bytes)
        return len(kept.ends) * self._state_bytes

    def kept_bytes(self, kept: Kept) -> int:
        """Return the bytes of all that is kept of a session."""
        return round(kept.num_tokens * self._bytes_per_token) + self.parts_bytes(kept)

    def new_bytes(self, kept: Kept, clean: Kept) -> tuple[int, int]:
        """Return the bytes of tokens, and of states or windows, in `kept` but not in `clean`."""
        tokens = max(0, kept.num_tokens - clean.num_tokens)
        parts = max(0, self.parts_bytes(kept) - self.parts_bytes(clean))
        return round(tokens * self._bytes_per_token), parts

    def charge(self, num_bytes: int) -> int:
        """Return the bytes of a tier that a session of so many bytes takes."""
        return num_bytes if self._window_bytes is None else self._window_bytes

    def kept_after(self, turn: Turn, before: Kept) -> Kept:
        """Return what is stored after a turn; `before` was kept of its prompt."""
        num_tokens = turn.kept_tokens
        if self._is_truncated:
            num_tokens = truncated(num_tokens, 0, self._window_tokens)
        if self._attention_window:
            return before.with_windows(turn, num_tokens)
        return before.with_states(turn, num_tokens) if self._state_bytes else Kept(num_tokens)

    def loadable(self, kept: Kept) -> int:
        """Return how many of the kept tokens can be loaded.

        With states: those before the last state. With windows: those before the last kept window.
        """
        if self._attention_window:
            return kept.last_window_end(self._attention_window)
        if self._state_bytes:
            return kept.ends[-1] if kept.ends else 0
        return kept.num_tokens

    def compute_ns(self, num_tokens: int) -> int:
        """Return the time to prefill so many tokens, without the fixed time."""
        return _ns(num_tokens * self._engine.prefill_s_per_token)

    def load_ns(self, num_tokens: int) -> int:
        """Return the time to load so many tokens from DRAM to HBM."""
        return _ns(self.loaded_bytes(num_tokens) / self._pcie_bytes_per_s)

    def prefill_ns(self, turn: Turn, loaded_tokens: int) -> int:
        """Return the time of a turn's prefill, during which `loaded_tokens` are loaded."""
        compute_ns = self._computed_ns(turn, loaded_tokens)
        return max(compute_ns, self.load_ns(loaded_tokens))

    def stall_ns(self, turn: Turn, loaded_tokens: int) -> int:
        """Return the part of that prefill that only waits for the load from DRAM."""
        compute_ns = self._computed_ns(turn, loaded_tokens)
        return max(0, self.load_ns(loaded_tokens) - compute_ns)

    def decode_ns(self, turn: Turn) -> int:
        """Return the time to decode a turn's answer, if no prefill interrupts it."""
        return _ns(turn.output_tokens * self._engine.decode_step_s)

    def _computed_ns(self, turn: Turn, loaded_tokens: int) -> int:
        num_computed = turn.history_tokens + turn.new_tokens - loaded_tokens
        return _ns(self._engine.fixed_s) + self.compute_ns(num_computed)


def most_bytes(model: PlannedModel | ReplayOptions, num_tokens: int) -> int:
    """Return the most bytes that can be kept of a session of so many tokens."""
    num_windowed = min(num_tokens, MOST_KEPT * model.attention_window)
    of_tokens = num_tokens * model.kv_bytes_per_token
    of_tokens += num_windowed * model.windowed_bytes_per_token
    return round(of_tokens) + MOST_KEPT * model.state_bytes


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


def keep_to_window(sessions: Sequence[Session], window_tokens: int) -> bool:
    """Return whether all prompts fit the window: only then the trace is truncated to it."""
    return all(
        turn.history_tokens + turn.new_tokens <= window_tokens
        for session in sessions
        for turn in session.turns
    )


STRAY_SHARE = 0.01  # of the sessions at either end, which may be far from all others


def recompute_load(sessions: Sequence[Session], engine: EngineConstants) -> float:
    """Return the engine time per second that the arrivals need without a cache.

    Above 1, queues grow. The duration of the arrivals is computed without the first and the last
    hundredth of the sessions: a few stray ones would make a trace look idle. 0: all arrive at once.
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
    """Return an engine so much faster or slower that the recompute load is `load`.

    Arrivals and think times are not changed: with longer pauses, sessions would no longer overlap.
    If all sessions arrive at once, the engine is returned as it is.
    """
    return engine.scaled(load / (recompute_load(sessions, engine) or load))


def _recompute_s(turn: Turn, engine: EngineConstants) -> float:
    """Return a turn's engine time without a cache; its decode takes one slot's share."""
    return (
        engine.fixed_s
        + (turn.history_tokens + turn.new_tokens) * engine.prefill_s_per_token
        + turn.output_tokens * engine.decode_step_s / engine.slots
    )
