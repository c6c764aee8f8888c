"""What `kvd plan --observe` found, for people. Pure."""

from collections.abc import Iterator

from rich.table import Table

from kvd.plan.observe import MIN_JUDGED, MIN_SESSIONS, HitRates, Observation
from shared.types.units import format_bytes, format_duration


def observation_tables(model: str, observed: Observation) -> Iterator[Table]:
    """What was seen of a layout, and what larger tiers would have found."""
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
            f"too few to go by: {MIN_JUDGED} judged turns of {MIN_SESSIONS} sessions are the least"
        )
    if observed.num_judged and not any(size.is_filled for size in observed.reachable):
        yield "all of it fits as it is: what was missed was not missed for want of room"


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
