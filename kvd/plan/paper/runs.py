"""The replays that the paper's figures need. Pure.

A scale below 1 replays that share of the sessions in that share of the tiers, after that share of
the warm-up, at the same arrival rate: the queue grows as long as sessions arrive, so it keeps its
proportion to the tiers.

The models differ only in their bytes per token and their window. The engine's constants are those
of LLaMA-13B: the text has no prefill or decode times of the other models.
"""

from dataclasses import dataclass
from typing import Literal

from kvd.plan.generate import sharegpt_like
from kvd.plan.hardware import MODELS, EngineConstants, Hardware, ReplayOptions
from kvd.plan.paper.numbers import (
    FALCON_40B,
    LLAMA_13B,
    LONG_ANSWER_TOKENS,
    LONG_DOCUMENT_TOKENS,
    LONG_QUESTION_TOKENS,
    LONG_QUESTIONS,
    LONG_RE_PREFILL_SHARE,
    LONG_RE_TTFT_S,
    NUM_SESSIONS,
    WARMUP_TURNS,
)
from kvd.plan.sweep import Cell
from kvd.plan.trace import Session, Turn
from kvd.plan.workload import coupled

GB, TB = 10**9, 10**12  # decimal, like the bytes of a token in MODELS
DRAM_BYTES = 128 * GB
SMALL_SSD_BYTES, LARGE_SSD_BYTES = 2 * TB, 10 * TB
HBM_CACHE_BYTES = 10 * GB
SSD_BYTES_PER_S = 5e9  # "less than 5 GB/s" (§2.4)
TTL_S = 3600.0
QUICK_SCALE = 0.05

LONG_MODEL = "mistral-7b"
LONG_SESSIONS = 8

# Falcon's own window is 2,048, but its stated loss by overflows (18.4) is that of the models with
# 4,096 (17.6, 18.1), not that of LLaMA-65B with 2,048 (41.5).
WINDOW_TOKENS = {name: model.window_tokens for name, model in MODELS.items()} | {FALCON_40B: 4096}

RECOMPUTE = ""  # no policy: RE
CA_POLICY, LETTER_POLICY = "lookahead_queue", "lookahead"
Charge = Literal["packed", "window"]
Overflow = Literal["", "turn", "session"]


@dataclass(frozen=True, slots=True)
class Workload:
    """The arriving sessions.

    Attributes:
        window_tokens: the window to which contexts are truncated.
        rate: sessions that begin per second.
        overflow: the effect of a truncation on stored KV. "": none (positions are not stored);
            "turn": it is useless, and the next turn recomputes it (OF); "session": so do all later
            turns of the session.
        is_long: the preprint's documents instead: six questions about each.
    """

    window_tokens: int = WINDOW_TOKENS[LLAMA_13B]
    rate: float = 1.0
    overflow: Overflow = ""
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One replay.

    Attributes:
        model: the model's name.
        policy: a policy's name; "": nothing is reused (RE).
        charge: a session takes its bytes of a tier, or always those of a full window.
        rate, overflow: see Workload.
        speed: factor of the engine's speed.
        is_thinking: users think between their turns.
        is_guarded: a history that is slower to load than to compute is computed.
    """

    model: str = LLAMA_13B
    policy: str = CA_POLICY
    dram_bytes: int = DRAM_BYTES
    ssd_bytes: int = LARGE_SSD_BYTES
    charge: Charge = "window"
    rate: float = 1.0
    overflow: Overflow = ""
    ttl_s: float | None = None
    ssd_bytes_per_s: float = SSD_BYTES_PER_S
    speed: float = 1.0
    is_thinking: bool = False
    is_guarded: bool = False

    @property
    def workload(self) -> Workload:
        """The arriving sessions."""
        if self.model == LONG_MODEL:
            return Workload(WINDOW_TOKENS[self.model], is_long=True)
        return Workload(WINDOW_TOKENS[self.model], self.rate, self.overflow)


@dataclass(frozen=True, slots=True)
class Sample:
    """The sample of sessions.

    Attributes:
        seed: its seed.
        scale: its size; 1: the paper's.
    """

    seed: int
    scale: float = 1.0


def sessions_of(workload: Workload, sample: Sample) -> list[Session]:
    """Draw the sessions."""
    if workload.is_long:
        return [_document()] * LONG_SESSIONS
    num_sessions = round(NUM_SESSIONS * sample.scale)
    sessions = sharegpt_like(num_sessions, workload.rate, workload.window_tokens, sample.seed)
    if not workload.overflow:
        return sessions
    is_for_good = workload.overflow == "session"
    return [coupled(session, is_for_good=is_for_good) for session in sessions]


def cell_of(run: Run, sample: Sample) -> Cell:
    """Return the cell of a run, for the sweep."""
    is_long = run.workload.is_long
    warmup_turns = LONG_SESSIONS if is_long else round(WARMUP_TURNS * sample.scale)
    load_policy: Literal["always", "auto", "never"] = "auto" if run.is_guarded else "always"
    hardware = Hardware(
        dram_bytes=round(run.dram_bytes * sample.scale),
        ssd_bytes=round(run.ssd_bytes * sample.scale),
        ssd_bytes_per_s=run.ssd_bytes_per_s,
        engine=long_engine() if is_long else EngineConstants().scaled(1 / run.speed),
    )
    options = ReplayOptions(
        policy=run.policy or CA_POLICY,
        kv_bytes_per_token=MODELS[run.model].kv_bytes_per_token,
        charge=run.charge,
        window_tokens=run.workload.window_tokens,
        tiers="exclusive",
        ttl_s=run.ttl_s,
        warmup_turns=warmup_turns,
        load_policy=load_policy if run.policy else "never",
        think_scale=float(run.is_thinking),
    )
    return Cell(hardware, options)


def window_bytes(model: str) -> int:
    """Return the bytes of a full context: the most that a session can need (the paper's CCpS)."""
    return WINDOW_TOKENS[model] * MODELS[model].kv_bytes_per_token


# ------------------------------------------------------------------------- the preprint's documents


def long_engine() -> EngineConstants:
    """Return Mistral-7B on one A100 with a batch of one, as in the preprint's RE.

    RE's TTFT at 28K tokens gives the time of a prompt token; its share of prefills gives the time
    of a decode step.
    """
    prefill_s = LONG_RE_TTFT_S.value
    decode_s = prefill_s / (LONG_RE_PREFILL_SHARE.value / 100) - prefill_s
    return EngineConstants(
        slots=1,
        prefill_s_per_token=prefill_s / (LONG_DOCUMENT_TOKENS + LONG_QUESTION_TOKENS),
        decode_step_s=decode_s / LONG_ANSWER_TOKENS,
        fixed_s=0.0,
    )


def _document() -> Session:
    """Return a session about one document, which comes with the first question."""
    turns = []
    history = 0
    for index in range(LONG_QUESTIONS):
        new = LONG_QUESTION_TOKENS + (0 if index else LONG_DOCUMENT_TOKENS)
        turns.append(Turn(new, LONG_ANSWER_TOKENS, history, 0.0))
        history += new + LONG_ANSWER_TOKENS
    return Session(0.0, tuple(turns))
