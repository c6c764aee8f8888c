"""`inference-svc status`: one screen about a service, or all its values with their meanings.

The screen has what operators ask first: the model, the running turns, the hit rate, the time to
first token, the tokens per second, and troubles.
"""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Annotated

import typer
from rich.table import Table

from inference_svc.cli.connection import Address, TlsCa, TlsCert, TlsKey, TokenFile, client_of
from inference_svc.core.counters import COUNTERS
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.terminal import printing
from shared.terminal.printing import counted, hanging, plain
from shared.types.units import format_bytes, format_duration

MAPS = ("gauges", "counters")  # fields of Model that have tables of their own
TROUBLES = (  # counts that are shown as troubles if they are not 0
    *("turns_failed", "turns_refused", "expired", "steps_failed"),
    *("load_errors", "loads_retried", "save_errors", "save_dropped", "saves_refused"),
    *("shifts_failed", "store_discards_failed"),
)
_INDENT = 13


def status(
    address: Address,
    everything: Annotated[
        bool, typer.Option("--all", help="Every gauge and count, with its meaning.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> None:
    """Show a running service's model, state and load; exit code 69 if none answers."""

    async def get_model() -> pb.Model:
        async with client_of(address, token_file, tls_ca, tls_cert, tls_key) as client:
            return await client.get_model()

    model = asyncio.run(get_model())
    if as_json:
        typer.echo(json.dumps(plain(model), indent=2))
        return
    console = printing.console()
    if everything:
        console.print(*status_tables(model), sep="")
        return
    for line in status_lines(model, console.width):
        typer.echo(line)


def status_lines(model: pb.Model, width: int) -> Iterator[str]:
    """Yield the lines of the screen: a label and one or two lines for each value."""
    for label, text in _rows(model, model.counters, model.gauges):
        yield hanging(label, text, width, _INDENT)


def _rows(
    model: pb.Model, counts: Mapping[str, int], gauges: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    yield "model", f"{model.name} ({model.architecture}, {model.dtype} on {model.device})"
    uptime = f", up {format_duration(gauges['uptime_s'])}" if "uptime_s" in gauges else ""
    yield "service", f"{model.version}{uptime}, mode {model.mode}, kvd {model.kvd_state}"
    kv = f"{format_bytes(model.kv_bytes_per_token)} of KV a token"
    bound = f" ({model.window_bound})" if model.window_bound else ""
    when_full = f"when full: {model.overflow or 'reject'}"
    yield "context", f"{model.context_window:,} tokens{bound}, {when_full}; {kv}"
    if model.embedding_size:
        yield "embeddings", f"of {model.embedding_size:,} values"
    ended = (("turns_finished", "answered"), ("turns_cancelled", "cancelled"))
    yield (
        "turns",
        f"{model.running_turns} run, {model.waiting_turns} wait; "
        + ", ".join(f"{counts.get(name, 0):,} {word}" for name, word in ended),
    )
    yield "hit rate", _hit_rate(counts)
    yield "first token", _ttft(gauges)
    yield "answers", _answers(counts, gauges)
    yield "KV in memory", _memory(gauges)
    troubles = [f"{counts[name]:,} {COUNTERS[name]}" for name in TROUBLES if counts.get(name)]
    for index, trouble in enumerate(troubles or ["none"]):
        yield "" if index else "troubles", trouble


def hit_rate(counts: Mapping[str, int]) -> float | None:
    """Return the share of history tokens that were reused; None if there was no history."""
    history = counts.get("history_tokens", 0)
    return counts.get("reused_tokens", 0) / history if history else None


def _hit_rate(counts: Mapping[str, int]) -> str:
    share = hit_rate(counts)
    if share is None:
        return "no turn had a history yet"
    return (
        f"{share:.1%} of {counts['history_tokens']:,} tokens of history were reused, "
        f"{counts.get('recomputed_tokens', 0):,} computed again; "
        f"{counts.get('new_tokens', 0):,} were new"
    )


def _ttft(gauges: Mapping[str, float]) -> str:
    if "ttft_p50_s" not in gauges:
        return "none yet"
    half, most = (format_duration(gauges[f"ttft_{name}_s"]) for name in ("p50", "p95"))
    return f"after {half} for half of the turns, {most} for 95 %"


def _answers(counts: Mapping[str, int], gauges: Mapping[str, float]) -> str:
    num_tokens = counts.get("output_tokens", 0)
    words = [f"{num_tokens:,} tokens"]
    if num_tokens and gauges.get("compute_busy_s"):
        words.append(f"{num_tokens / gauges['compute_busy_s']:,.3g} tokens/s while it computes")
    if num_tokens and gauges.get("uptime_s"):
        words.append(f"{num_tokens / gauges['uptime_s']:,.3g}/s since the start")
    if "tpot_p50_s" in gauges:
        words.append(f"{format_duration(gauges['tpot_p50_s'])} a token")
    return ", ".join(words)


def _memory(gauges: Mapping[str, float]) -> str:
    slots, free = (
        int(gauges.get(name, 0)) for name in ("pool_token_slots", "pool_free_token_slots")
    )
    share = f" ({(slots - free) / slots:.0%})" if slots else ""
    resting = int(gauges.get("resident_sessions", 0))
    return (
        f"{slots - free:,} of {slots:,} token slots{share}; "
        f"{counted(resting, 'session rests', 'sessions rest')} in it"
    )


def status_tables(model: pb.Model) -> Iterator[Table]:
    """Yield three tables: the model and service, the gauges, and the counts since the start."""
    served = _table("what", "value")
    for name, value in plain(model).items():
        if name not in MAPS:
            served.add_row(name, str(value))
    yield served
    if model.gauges:
        gauges = _table("\nnow", "\nvalue")
        for name, number in sorted(model.gauges.items()):
            gauges.add_row(name, format_gauge(name, number))
        yield gauges
    counted = _table("\nsince the start", "\ncount", "\nwhat")
    for name in (*COUNTERS, *sorted(set(model.counters) - set(COUNTERS))):
        if name in model.counters:  # a service of another version may not have it
            counted.add_row(name, f"{model.counters[name]:,}", COUNTERS.get(name, ""))
    yield counted


def _table(*headings: str) -> Table:
    """Return an empty table in the style of kvd's tables."""
    return Table(*headings, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def format_gauge(name: str, value: float) -> str:
    """Format a gauge's value; the suffix of its name is its unit."""
    if name.endswith("_per_s"):
        return f"{value:,.0f} /s"
    if name.endswith("_s"):
        return format_duration(value)
    if name.endswith("_bytes"):
        return format_bytes(int(value))
    return f"{value:,.0f}" if value.is_integer() else f"{value:,.3g}"
