"""The measurements of a replay. Pure.

Turns count from the end of the warm-up on, in the order in which they start. A hit is a turn whose
whole history is loaded. The TTFT has two forms: from the turn's arrival, as the user sees it; and
from its start, without the wait in the queue, as the paper has it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from kvd.core.records.tier import Tier
from shared.types.units import NS_PER_S

BUSY_QUEUE = 4  # requests ahead: with so many there is time for a prefetch
_S_PER_H = 3600


@dataclass(slots=True)
class TurnRecord:
    """The measurements of one turn.

    Attributes:
        arrived_ns, started_ns: when it arrived, and got its slot.
        answered_ns: when its first token was there.
        num_ahead: requests that waited when it arrived.
        history_tokens, new_tokens: the parts of its prompt.
        loaded_tokens: tokens of the history that were loaded.
        found_in: the tier that had them when it started; None: none.
        was_resident: its session was in DRAM when it arrived.
        is_of_tools: it brings the results of tools that the answer before it called.
        lacks_part: tokens of it are held, but no state or window to load them with.
        stored_bytes: bytes stored after it that were not stored before: of tokens, and of states or
            windows.
        is_fetched: what was loaded came from the remote store.
        has_moved: the turn before it was on another server.
    """

    arrived_ns: int
    num_ahead: int
    history_tokens: int
    new_tokens: int
    started_ns: int = 0
    answered_ns: int = 0
    loaded_tokens: int = 0
    found_in: Tier | None = None
    was_resident: bool = False
    is_of_tools: bool = False
    lacks_part: bool = False
    stored_bytes: tuple[int, int] = (0, 0)
    is_fetched: bool = False
    has_moved: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a replay. Shares are between 0 and 1; a share of nothing is 0.

    Attributes:
        num_turns: turns in the trace.
        num_turns_measured: turns after the warm-up.
        hits_all: hits per turn; first turns cannot hit.
        hits_fu: hits per turn with history.
        hits_tok: history tokens loaded per history token: the prefill saved.
        dram_share: share of the hits that was in DRAM when the turn started.
        dram_share_4_ahead: the same, of hits with at least four requests waiting at their arrival.
        num_guarded: turns whose history was held, but was not worth loading.
        guarded_fu: these per turn with history.
        resident_fu: turns with history whose session was in DRAM when they arrived, per turn with
            history.
        resident_tools: the same, of turns that bring the results of tools.
        num_tool_returns: the number of such turns.
        recomputed_per_turn: mean history tokens of a turn that were not loaded.
        stored_bytes_per_turn: mean bytes stored after a turn that were not stored before it: of
            new and recomputed tokens, and of states or windows.
        parts_of_stored: share of states or windows in these.
        parts_of_dram: share of states or windows in DRAM's content, the mean of some moments.
        parts_of_ssd: the same of SSD.
        num_partless: turns whose history tokens were held, but not loadable for lack of a state or
            window.
        partless_fu: these per turn with history.
        ttft_mean_s: mean seconds from arrival to the first token.
        start_ttft_mean_s: mean seconds from a turn's start to its first token, without the queue.
        queue_mean: requests that waited when a turn arrived.
        prefill_tokens_per_s: prompt tokens per second of prefill.
        gpu_hours: time in which the engine computed.
        prefill_hours: time of these in prefills.
        ssd_bytes_written: bytes that stores and evictions wrote to SSD.
        recompute_load: load of the whole trace without a cache: see `kvd.plan.hardware`.
        moved_fu: turns on another server than the turn before, per turn with history. This and
            the following are for plans with several servers.
        fetched_tok: history tokens fetched from the remote store, per history token.
        num_retried: turns that began again because their server was lost.
        busiest: computing time of the busiest server, divided by the mean of all.
        bytes_pushed: bytes sent to the remote store.
        store_puts: requests of the remote store that write an object.
        store_gets: requests that read an object, or find that there is none.
        prompt_tokens: tokens of all prompts, histories included.
    """

    num_turns: int
    num_turns_measured: int
    hits_all: float
    hits_fu: float
    hits_tok: float
    dram_share: float
    dram_share_4_ahead: float
    num_hits: int
    num_hits_4_ahead: int
    num_guarded: int
    ttft_mean_s: float
    ttft_p99_s: float
    start_ttft_mean_s: float
    start_ttft_p99_s: float
    queue_mean: float
    queue_p99: int
    prefill_tokens_per_s: float
    gpu_hours: float
    prefill_hours: float
    span_s: float
    ssd_bytes_written: int
    ssd_bytes_read: int
    recompute_load: float
    guarded_fu: float
    resident_fu: float
    resident_tools: float
    num_tool_returns: int
    recomputed_per_turn: float
    stored_bytes_per_turn: float
    parts_of_stored: float
    parts_of_dram: float
    parts_of_ssd: float
    num_partless: int
    partless_fu: float
    moved_fu: float = 0.0
    fetched_tok: float = 0.0
    num_retried: int = 0
    busiest: float = 0.0
    bytes_pushed: int = 0
    bytes_fetched: int = 0
    store_puts: int = 0
    store_gets: int = 0
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one moment; an outcome is a difference of two."""

    now_ns: int = 0
    busy_ns: int = 0
    prefill_ns: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    bytes_pushed: int = 0
    bytes_fetched: int = 0
    store_puts: int = 0
    store_gets: int = 0

    def plus(self, other: "Totals") -> "Totals":
        """Return the sums of both counters, at the later of their moments."""
        now_ns = max(self.now_ns, other.now_ns)
        pairs = zip(astuple(self)[1:], astuple(other)[1:], strict=True)
        return Totals(now_ns, *map(sum, pairs))


@dataclass(slots=True)
class Tally:
    """Sums over the measured turns."""

    num_turns: int = 0
    num_with_history: int = 0
    num_hits: int = 0
    num_dram_hits: int = 0
    num_hits_4_ahead: int = 0
    num_dram_hits_4_ahead: int = 0
    num_guarded: int = 0
    num_partless: int = 0
    num_resident: int = 0
    num_tool_returns: int = 0
    num_resident_tools: int = 0
    history_tokens: int = 0
    loaded_tokens: int = 0
    prompt_tokens: int = 0
    stored_bytes: int = 0
    stored_parts_bytes: int = 0
    num_moved: int = 0
    fetched_tokens: int = 0
    held_bytes: Counter[Tier] = field(default_factory=Counter)  # summed over the samples
    held_parts_bytes: Counter[Tier] = field(default_factory=Counter)
    ttfts_ns: list[int] = field(default_factory=list)
    start_ttfts_ns: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)

    def add(self, turn: TurnRecord) -> None:
        """Count a turn that has ended."""
        self.num_turns += 1
        self.num_with_history += turn.history_tokens > 0
        self.history_tokens += turn.history_tokens
        self.loaded_tokens += turn.loaded_tokens
        self.fetched_tokens += turn.loaded_tokens * turn.is_fetched
        self.prompt_tokens += turn.history_tokens + turn.new_tokens
        self.ahead.append(turn.num_ahead)
        self.ttfts_ns.append(turn.answered_ns - turn.arrived_ns)
        self.start_ttfts_ns.append(turn.answered_ns - turn.started_ns)
        self.stored_bytes += sum(turn.stored_bytes)
        self.stored_parts_bytes += turn.stored_bytes[1]
        if turn.history_tokens:
            self.num_resident += turn.was_resident
            self.num_moved += turn.has_moved
            self.num_tool_returns += turn.is_of_tools
            self.num_resident_tools += turn.was_resident and turn.is_of_tools
        if not turn.loaded_tokens:
            self.num_partless += turn.lacks_part
            self.num_guarded += turn.found_in is not None and not turn.lacks_part
            return
        in_dram = turn.found_in is Tier.DRAM and not turn.is_fetched
        was_busy = turn.num_ahead >= BUSY_QUEUE
        self.num_hits += 1
        self.num_dram_hits += in_dram
        self.num_hits_4_ahead += was_busy
        self.num_dram_hits_4_ahead += in_dram and was_busy

    def add_sample(self, held: Mapping[Tier, tuple[int, int]]) -> None:
        """Count each tier's content at some moment: all bytes, and those of states or windows."""
        for tier, (num_bytes, parts_bytes) in held.items():
            self.held_bytes[tier] += num_bytes
            self.held_parts_bytes[tier] += parts_bytes

    def outcome(self, num_turns: int, load: float, since: Totals, until: Totals) -> Outcome:
        """Return the outcome.

        Args:
            num_turns: turns in the trace.
            load: the recompute load.
            since: counters at the end of the warm-up.
            until: counters now.
        """
        prefill_ns = until.prefill_ns - since.prefill_ns
        return Outcome(
            num_turns=num_turns,
            num_turns_measured=self.num_turns,
            hits_all=_share(self.num_hits, self.num_turns),
            hits_fu=_share(self.num_hits, self.num_with_history),
            hits_tok=_share(self.loaded_tokens, self.history_tokens),
            dram_share=_share(self.num_dram_hits, self.num_hits),
            dram_share_4_ahead=_share(self.num_dram_hits_4_ahead, self.num_hits_4_ahead),
            num_hits=self.num_hits,
            num_hits_4_ahead=self.num_hits_4_ahead,
            num_guarded=self.num_guarded,
            ttft_mean_s=_mean(self.ttfts_ns) / NS_PER_S,
            ttft_p99_s=_p99(self.ttfts_ns) / NS_PER_S,
            start_ttft_mean_s=_mean(self.start_ttfts_ns) / NS_PER_S,
            start_ttft_p99_s=_p99(self.start_ttfts_ns) / NS_PER_S,
            queue_mean=_mean(self.ahead),
            queue_p99=_p99(self.ahead),
            prefill_tokens_per_s=_share(self.prompt_tokens * NS_PER_S, prefill_ns),
            gpu_hours=(until.busy_ns - since.busy_ns) / NS_PER_S / _S_PER_H,
            prefill_hours=prefill_ns / NS_PER_S / _S_PER_H,
            span_s=(until.now_ns - since.now_ns) / NS_PER_S,
            ssd_bytes_written=until.bytes_written - since.bytes_written,
            ssd_bytes_read=until.bytes_read - since.bytes_read,
            recompute_load=load,
            guarded_fu=_share(self.num_guarded, self.num_with_history),
            resident_fu=_share(self.num_resident, self.num_with_history),
            resident_tools=_share(self.num_resident_tools, self.num_tool_returns),
            num_tool_returns=self.num_tool_returns,
            recomputed_per_turn=_share(self.history_tokens - self.loaded_tokens, self.num_turns),
            stored_bytes_per_turn=_share(self.stored_bytes, self.num_turns),
            parts_of_stored=_share(self.stored_parts_bytes, self.stored_bytes),
            parts_of_dram=self._parts_share(Tier.DRAM),
            parts_of_ssd=self._parts_share(Tier.SSD),
            num_partless=self.num_partless,
            partless_fu=_share(self.num_partless, self.num_with_history),
            moved_fu=_share(self.num_moved, self.num_with_history),
            fetched_tok=_share(self.fetched_tokens, self.history_tokens),
            prompt_tokens=self.prompt_tokens,
            bytes_pushed=until.bytes_pushed - since.bytes_pushed,
            bytes_fetched=until.bytes_fetched - since.bytes_fetched,
            store_puts=until.store_puts - since.store_puts,
            store_gets=until.store_gets - since.store_gets,
        )

    def _parts_share(self, tier: Tier) -> float:
        return _share(self.held_parts_bytes[tier], self.held_bytes[tier])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(values: Sequence[int]) -> float:
    return _share(sum(values), len(values))


def _p99(values: Sequence[int]) -> int:
    """Return the smallest value that 99 % of them do not exceed."""
    return sorted(values)[-(-len(values) * 99 // 100) - 1] if values else 0
