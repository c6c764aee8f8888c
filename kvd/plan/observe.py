"""kvd plan --observe: what larger tiers would have found of a daemon's own recent turns. Pure.

The daemon's log begins in the middle: for the first turn of a session in it, it is unknown when its
history was stored, and the replay begins with empty tiers. Therefore only turns in the second half
of the log count, and only those with an earlier turn of their session in the log. The daemon's real
hit rates are computed over the same turns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

from kvd.core.records.tier import Tier
from kvd.core.state.turn_log import RecordedTurn
from kvd.plan.recorded_replay import ObservedCache, replay_recorded
from shared.types.units import NS_PER_S, format_bytes, format_duration

SCALES = (1, 2, 4)
MIN_JUDGED = 200  # with fewer turns, chance alone changes a share by several points
MIN_SESSIONS = 50


@dataclass(frozen=True, slots=True)
class HitRates:
    """Hit rates, as shares between 0 and 1.

    Attributes:
        tok: history tokens found, of those wanted.
        fu: turns that found all of their history, of those that have one.
        dram: tokens found in DRAM, of those found.
    """

    tok: float
    fu: float
    dram: float


@dataclass(frozen=True, slots=True)
class Reachable:
    """The hit rates of tiers of one size.

    Attributes:
        dram_scale, ssd_scale: their size, in multiples of the daemon's.
        rates: the hit rates.
        is_filled: the observed turns fill these tiers. If they do not, no session was evicted, and
            larger tiers would find nothing more.
    """

    dram_scale: int
    ssd_scale: int
    dram_bytes: int
    ssd_bytes: int
    rates: HitRates
    is_filled: bool


@dataclass(frozen=True, slots=True)
class Observation:
    """The result for one layout.

    Attributes:
        had: the daemon's real hit rates.
        num_judged: turns that the rates are computed over.
        is_log_full: older turns were forgotten.
        is_too_few: there are too few turns for the rates to mean much.
        footprint_bytes: KV of all observed sessions, each at its largest.
        reachable: the results by size.
    """

    num_turns: int
    num_sessions: int
    num_judged: int
    span_s: float
    is_log_full: bool
    is_too_few: bool
    footprint_bytes: int
    had: HitRates
    reachable: tuple[Reachable, ...]


def observe(
    turns: Sequence[RecordedTurn],
    cache: ObservedCache,
    max_turns: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Observation:
    """Replay a daemon's recent turns with its tiers, and with tiers twice and four times as large.

    Args:
        turns: recorded turns as the daemon lists them, oldest first.
        cache: the daemon's real cache.
        max_turns: number of turns that the daemon remembers.
        on_progress: called with the number of replays done.
    """
    judged = [index for index in range(len(turns) // 2, len(turns)) if _is_judged(turns[index])]
    footprint = _footprint_bytes(turns, cache)
    reachable: list[Reachable] = []
    for dram_scale, ssd_scale in _sizes(cache):
        dram_bytes, ssd_bytes = cache.dram_bytes * dram_scale, cache.ssd_bytes * ssd_scale
        found = replay_recorded(turns, cache, dram_bytes, ssd_bytes)
        rates = _rates(
            cache,
            [
                (turns[i].wanted_tokens, found[i].tokens, found[i].tokens * _in_dram(found[i].tier))
                for i in judged
            ],
        )
        is_filled = footprint > max(dram_bytes, ssd_bytes)  # tiers are inclusive
        reachable.append(Reachable(dram_scale, ssd_scale, dram_bytes, ssd_bytes, rates, is_filled))
        on_progress(len(reachable))
    num_sessions = len({turn.session for turn in turns})
    return Observation(
        num_turns=len(turns),
        num_sessions=num_sessions,
        num_judged=len(judged),
        span_s=(turns[-1].started_ns - turns[0].started_ns) / NS_PER_S if turns else 0.0,
        is_log_full=len(turns) >= max_turns,
        is_too_few=len(judged) < MIN_JUDGED or num_sessions < MIN_SESSIONS,
        footprint_bytes=footprint,
        had=_rates(cache, [_granted(turns[index]) for index in judged]),
        reachable=tuple(reachable),
    )


def num_replays(cache: ObservedCache) -> int:
    """Return how many replays an observation takes."""
    return len(_sizes(cache))


def _is_judged(turn: RecordedTurn) -> bool:
    return turn.turn > 1 and turn.is_asked and turn.wanted_tokens > 0


def _sizes(cache: ObservedCache) -> list[tuple[int, int]]:
    """Combine factors of DRAM and SSD; of a tier that is not there, only one."""
    ssd_scales = SCALES if cache.ssd_bytes else SCALES[:1]
    return [(dram, ssd) for ssd in ssd_scales for dram in SCALES]


def _granted(turn: RecordedTurn) -> tuple[int, int, int]:
    return turn.wanted_tokens, turn.dram_tokens + turn.ssd_tokens, turn.dram_tokens


def _in_dram(tier: Tier | None) -> bool:
    return tier is Tier.DRAM


def _rates(cache: ObservedCache, turns: Iterable[tuple[int, int, int]]) -> HitRates:
    """Return the hit rates of (wanted, found, found in DRAM) tokens of turns.

    A turn that lacks less than a block has found all.
    """
    num_turns = num_hits = wanted = found = in_dram = 0
    for turn_wanted, turn_found, turn_in_dram in turns:
        num_turns += 1
        num_hits += turn_found + cache.block_tokens > turn_wanted
        wanted += turn_wanted
        found += turn_found
        in_dram += turn_in_dram
    return HitRates(_share(found, wanted), _share(num_hits, num_turns), _share(in_dram, found))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _footprint_bytes(turns: Sequence[RecordedTurn], cache: ObservedCache) -> int:
    largest: dict[int, int] = {}
    for turn in turns:
        largest[turn.session] = max(turn.stored_tokens, largest.get(turn.session, 0))
    return sum(cache.num_bytes(num_tokens) for num_tokens in largest.values())


def observation_tables(model: str, observed: Observation) -> Iterator[Table]:
    """Yield the tables of one layout: the observed turns, and the hit rates by size."""
    yield _facts(model, observed)
    if observed.num_judged:
        yield _rates_table(observed)


def _facts(model: str, observed: Observation) -> Table:
    facts = Table(box=None, show_header=False)
    facts.add_row("model", model[:12])
    turns = f"{observed.num_turns} of {observed.num_sessions} sessions"
    turns += f" in {format_duration(observed.span_s)}"
    turns += "; older ones are forgotten" if observed.is_log_full else ""
    facts.add_row("turns seen", turns)
    facts.add_row("judged", f"{observed.num_judged}, with history, of the newer half")
    facts.add_row("their KV", format_bytes(observed.footprint_bytes))
    for warning in _warnings(observed):
        facts.add_row("", warning)
    return facts


def _warnings(observed: Observation) -> Iterator[str]:
    if observed.is_too_few:
        yield (
            f"there are too few turns to judge by: at least {MIN_JUDGED} judged turns of "
            f"{MIN_SESSIONS} sessions are needed"
        )
    if observed.num_judged and not any(size.is_filled for size in observed.reachable):
        yield "everything fits as it is: no turn missed its KV for lack of room"


def _rates_table(observed: Observation) -> Table:
    table = Table(box=None, caption_justify="left", caption=_CAPTION)
    for heading in ("DRAM", "SSD", "history\ntokens\nfound", "turns\nthat found\nall", "in DRAM"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    table.add_row("as it was", "", *_percentages(observed.had), "really")
    for size in observed.reachable:
        table.add_row(
            _size(size.dram_scale, size.dram_bytes),
            _size(size.ssd_scale, size.ssd_bytes),
            *_percentages(size.rates),
            "" if size.is_filled else "holds all that was seen",
        )
    return table


def _size(scale: int, num_bytes: int) -> str:
    return f"{format_bytes(num_bytes)} (x{scale})" if num_bytes else "none"


def _percentages(rates: HitRates) -> tuple[str, ...]:
    return tuple(f"{share:.1%}" for share in (rates.tok, rates.fu, rates.dram))


_CAPTION = (
    "turns that found all: of those with history. in DRAM: of the tokens found. Sizes are replayed"
    " from empty tiers, in the recorded order, whole sessions only."
)
