"""The question of a replay, put to the planner: its sessions as a trace, and the command.

The two processes do not import each other: what `kvd plan` needs goes through a file. Schema: see
`trace.py`, sorted by `t`; `t` is as if answers took no time, since `kvd plan` replays closed-loop.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import join

from inference_svc.bench.options import PoliciesOptions
from inference_svc.bench.trace import Session, truncated


def plan_command(
    trace: Path,
    options: PoliciesOptions,
    capacity: Mapping[str, int],
    kv_bytes_per_token: int,
    constants: Mapping[str, str],
) -> str:
    """Say, for a shell, how the planner is asked.

    kvd writes through: what is in DRAM is on SSD, too. It charges what a session has, packed.

    Args:
        trace: written for it.
        options: of the replay.
        capacity: "dram" and "ssd", in bytes.
        kv_bytes_per_token: of the model.
        constants: what turns take, by the planner's options; it has some of its own.
    """
    words = {
        "trace": trace,
        "policy": ",".join(options.policies),
        "kv-bytes-per-token": kv_bytes_per_token,
        **capacity,
        "tiers": "inclusive",
        "charge": "packed",
        "ttl": "never",
        "slots": options.max_running,
        "warmup-turns": options.warmup_turns,
        **constants,
    }
    return _command(words, *(["--end-hints"] if options.end_hints else []))


def positions_commands(path: Path, window_tokens: int, kv_bytes_per_token: int) -> list[str]:
    """Say, for a shell, how the planner is asked what coupled positions lose; all tiers suffice."""
    words = {
        "trace": path,
        "policy": "lru",
        "kv-bytes-per-token": kv_bytes_per_token,
        "window": window_tokens,
        "capacity-share": "400%",
        "dram-share": "1",
        "ttl": "never",
        "warmup-turns": 0,
    }
    return [_command(words, "--positions", kind) for kind in ("decoupled", "coupled")]


def _command(words: Mapping[str, object], *more: str) -> str:
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return join(["kvd", "plan", *flags, *more])


def write_plan_trace(
    path: Path,
    sessions: Sequence[Session],
    starts_s: Sequence[float],
    *,
    window_tokens: int = 0,
) -> None:
    """Write the sessions, each of which begins at its time.

    With a window, contexts are truncated to it as the replay does it; 0: never.

    Raises:
        OSError: the file cannot be written.
    """
    turns = [
        turn
        for number, session in enumerate(sessions)
        for turn in _turns(number, session, starts_s[number], window_tokens)
    ]
    turns.sort(key=lambda turn: (turn["t"], turn["turn"]))
    lines = "".join(json.dumps(turn) + "\n" for turn in turns)
    path.write_text(lines, encoding="utf-8")


def _turns(
    number: int, session: Session, start_s: float, window_tokens: int
) -> Iterator[dict[str, float]]:
    history, now_s = 0, start_s
    for turn_number, turn in enumerate(session, 1):
        think_s = turn.think_s if turn_number > 1 else 0.0
        now_s += think_s
        if window_tokens:
            history = truncated(history, turn, window_tokens)
        yield {
            "t": round(now_s, 6),
            "session": number,
            "turn": turn_number,
            "new_tokens": turn.new_tokens,
            "output_tokens": turn.output_tokens,
            "history_tokens": history,
            "think_s": think_s,
        }
        history += turn.new_tokens + turn.output_tokens
