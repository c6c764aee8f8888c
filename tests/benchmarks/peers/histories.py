"""Compares turns after a long history with other engines. See README.md.

python -m tests.benchmarks.peers.histories --model DIRECTORY --engine NAME=PYTHON[:MODEL] ...
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shared.measuring.workspace import run_until_signal
from tests.benchmarks.peers.engines import OURS, Budget, read_choice, running_peers
from tests.benchmarks.peers.figures import Figures
from tests.benchmarks.peers.peer import Choice, Peer

FIRST_ID, LAST_ID = 10, 8000  # random tokens: a model with random weights reads no text
TURNS = 4


def _conversation(asked: argparse.Namespace, peer: Peer, number: int, figures: Figures) -> None:
    """Measure a conversation of one engine, with a restart before its last turn."""
    draw = random.Random(number)  # noqa: S311  # drawn the same for every engine
    name, prompt = f"conversation-{number}", _draw_tokens(draw, asked.history)
    for turn in range(1, TURNS + 1):
        line = f"turn {turn}, {len(prompt) - (asked.new if turn > 1 else 0)} tokens of history"
        if turn == 1:
            line = f"turn 1, {asked.history} new tokens"
        if turn == TURNS:
            line += ", after a restart"
            peer.settle()
            peer.kill()
            peer.start()
            peer.generate(["warm-up"], [_draw_tokens(draw, asked.new)])
        answers = peer.generate([name], [prompt], asked.answer, keep_tokens=len(prompt) * 2)
        figures.add(line, peer.name, number, answers.first_s())
        # Each continues its own answer: in a low precision they sometimes differ.
        prompt = [*prompt, *answers.ids[0], *_draw_tokens(draw, asked.new)]


def _draw_tokens(draw: random.Random, number: int) -> list[int]:
    return [draw.randrange(FIRST_ID, LAST_ID) for _ in range(number)]


async def _measure(asked: argparse.Namespace, directory: Path, figures: Figures) -> None:
    tokens = asked.history + TURNS * (asked.new + asked.answer)
    budget = Budget(4 * tokens, ours=2 * tokens, turn=tokens)
    async with running_peers(asked, directory / "histories", budget, asked.dtype) as peers:
        await asyncio.to_thread(_rounds, asked, peers, figures)


def _rounds(asked: argparse.Namespace, peers: Sequence[Peer], figures: Figures) -> None:
    for number in range(-1, asked.rounds):
        for peer in peers[number % len(peers) :] + peers[: number % len(peers)]:
            _conversation(asked, peer, number, figures)
        sys.stderr.write(f"{number + 1} of {asked.rounds} rounds\n")


def main() -> None:
    """Measure, and print tables of CPU seconds and of wall-clock seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of Transformers'")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME=PYTHON[:MODEL]")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--history", type=int, default=8192)
    parser.add_argument("--new", type=int, default=128, help="tokens of each turn")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    here = str(asked.model)
    others = [read_choice(text, here) for text in asked.engine]
    asked.engines = [Choice(OURS, sys.executable, here), *others]
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="peers-") as directory, suppress(KeyboardInterrupt):
        run_until_signal(lambda: _measure(asked, Path(directory), figures))
    names = [choice.name for choice in asked.engines]
    for clock in ("cpu", "wall"):
        sys.stdout.write(f"\n{clock}\n\n{figures.table(clock, names, OURS)}\n")


if __name__ == "__main__":
    main()
