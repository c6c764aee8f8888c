"""Compares this engine with other engines: same weights, tokens and rounds. See README.md.

python -m tests.benchmarks.peers.engines --model DIRECTORY [--engine NAME=PYTHON[:MODEL] ...]
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from transformers import AutoTokenizer

from inference_svc.bench.workspace import KvdSizes
from shared.children.child_kvd import running_child_kvd
from shared.measuring.workspace import run_until_signal
from tests.benchmarks.peers.adapters.adapter import kv_token_bytes
from tests.benchmarks.peers.figures import Figures
from tests.benchmarks.peers.peer import Answers, Choice, Peer, Seconds

OURS, REFERENCE = "ours", "transformers"
NUM_TURNS, TURN_TOKENS = 8, 256
PROMPT_TOKENS = 1024
BATCHES, DECODE_HISTORY, DECODE_STEPS = (1, 8), 128, 16
CONVERSATIONS, REPLAY_TURNS, REPLAY_TURN_TOKENS = 24, 3, 128
DOCS = Path(__file__).parents[3] / "docs"


@dataclass(frozen=True, slots=True)
class Budget:
    """Tokens whose KV may be in an engine's memory.

    Attributes:

    ours: the engine's part here, the rest is kvd's DRAM; SSD is not counted.

    turn: most tokens of a turn.
    """

    tokens: int
    ours: int
    turn: int


STEPS_KV = Budget(20480, ours=10240, turn=2304)  # nothing is evicted
RESTART_KV = Budget(6912, ours=4608, turn=2304)
REPLAY_KV = Budget(2304, ours=1152, turn=512)  # a quarter of the conversations' tokens


class Run:
    """Rounds over some peers.

    Attributes:

    figures: the measurements.
    """

    def __init__(self, peers: Sequence[Peer], text: Sequence[int], figures: Figures) -> None:
        self.figures = figures
        self._peers = list(peers)
        self._text = [*text, *text]

    def steps(self, number: int) -> None:
        """Measure every step once with every peer; round -1 does not count."""
        name = f"round-{number}"
        tokens = self._tokens(name, NUM_TURNS * TURN_TOKENS)
        for peer in self._in_turn(number):
            self._conversation(peer, number, name, tokens)
        prompt = self._tokens(f"{name}-prompt", PROMPT_TOKENS)
        for peer in self._in_turn(number):
            answers = self._first(peer, number, f"{name}-prompt", prompt)
            self.figures.add(f"prefill {PROMPT_TOKENS}", peer.name, number, answers.first_s())
        for batch in BATCHES:
            names = [f"{name}-decode-{batch}-{index}" for index in range(batch)]
            prompts = [self._tokens(one, DECODE_HISTORY) for one in names]
            for peer in self._in_turn(number):
                answers = peer.generate(names, prompts, DECODE_STEPS + 1)
                step_s = answers.step_s()
                self.figures.add(f"decode {batch}, a step", peer.name, number, step_s)
                self.figures.chose(f"decode {batch}", peer.name, number, answers.ids)

    def restart(self, number: int) -> None:
        """Kill every peer; the next turn of a conversation uses what survived."""
        name, end = f"restart-{number}", NUM_TURNS * TURN_TOKENS
        tokens = self._tokens(name, end)
        for peer in self._in_turn(number):
            history = tokens[:-TURN_TOKENS]
            self._first(peer, number, name, history, keep_tokens=len(history))
            peer.settle()
            peer.kill()
            self.figures.add("start-up", peer.name, number, peer.start())
            peer.generate(["warm-up"], [self._tokens("warm-up", TURN_TOKENS)])
            first_s = self._first(peer, number, name, tokens).first_s()
            self.figures.add(f"turn {NUM_TURNS} after a restart", peer.name, number, first_s)

    def replay(self, number: int) -> None:
        """Replay all conversations, turns shuffled, each turn to every peer before the next."""
        order = [index for index in range(CONVERSATIONS) for _ in range(REPLAY_TURNS)]
        random.Random(number).shuffle(order)  # noqa: S311  # drawn the same each time
        said = dict.fromkeys(range(CONVERSATIONS), 0)
        before = {peer.name: peer.settle() for peer in self._peers}
        for position, index in enumerate(order):
            said[index] += REPLAY_TURN_TOKENS
            name = f"replay-{number}-{index}"
            prompt = self._tokens(name, REPLAY_TURNS * REPLAY_TURN_TOKENS)[: said[index]]
            for peer in self._in_turn(position):
                answers = self._first(peer, number, name, prompt, keep_tokens=len(prompt))
                self.figures.add("replay, TTFT of all turns", peer.name, number, answers.first_s())
        for peer in self._peers:
            cpu_s = peer.settle() - before[peer.name]
            self.figures.add("replay, the process's CPU", peer.name, number, Seconds(0.0, cpu_s))

    def _conversation(self, peer: Peer, number: int, name: str, tokens: list[int]) -> None:
        for end in range(TURN_TOKENS, len(tokens) + 1, TURN_TOKENS):
            first_s = self._first(peer, number, name, tokens[:end], keep_tokens=end).first_s()
            line = f"prefill {NUM_TURNS} x {TURN_TOKENS}"
            self.figures.add(line, peer.name, number, first_s)
        self.figures.add(f"turn {NUM_TURNS}", peer.name, number, first_s)
        peer.settle()

    def _first(
        self, peer: Peer, number: int, name: str, prompt: list[int], keep_tokens: int = 0
    ) -> Answers:
        answers = peer.generate([name], [prompt], keep_tokens=keep_tokens)
        self.figures.chose(f"{name} {len(prompt)}", peer.name, number, answers.ids)
        return answers

    def _in_turn(self, number: int) -> list[Peer]:
        """Return the peers in this round's order: every round begins with another one."""
        first = number % len(self._peers)
        return self._peers[first:] + self._peers[:first]

    def _tokens(self, name: str, number: int) -> list[int]:
        """Return tokens of the text, from a position that depends on the name."""
        first = random.Random(name).randrange(len(self._text) // 2)  # noqa: S311  # as above
        return self._text[first : first + number]


@asynccontextmanager
async def running_peers(
    asked: argparse.Namespace, directory: Path, budget: Budget, dtype: str = "float32"
) -> AsyncIterator[list[Peer]]:
    """Start all peers, ours with a kvd beside it; they are killed at the end."""
    token_bytes = kv_token_bytes(str(asked.model))
    dram_bytes = (budget.tokens - budget.ours) * token_bytes
    sizes = KvdSizes(dram_bytes=dram_bytes, ssd_bytes=4 << 30)
    store, kvd = directory / "store", directory / "kvd"
    for path in (directory, store, kvd):
        path.mkdir(mode=0o700)
    async with running_child_kvd(sizes.toml(), directory, kvd, directory / "state"):
        peers = [
            Peer(
                choice,
                directory,
                kv_tokens=budget.ours if choice.name == OURS else budget.tokens,
                turn_tokens=budget.turn,
                store=str(kvd if choice.name == OURS else store),
                dtype=dtype,
            )
            for choice in asked.engines
        ]
        with _start_all(peers):
            yield peers


@contextmanager
def _start_all(peers: Sequence[Peer]) -> Iterator[None]:
    try:
        for peer in peers:
            took = peer.start()
            _say(f"{peer.name} is ready after {took.wall:.1f} s, {took.cpu:.1f} s of CPU")
        yield
    finally:
        for peer in peers:
            peer.kill()


def _say(text: str) -> None:
    load = os.getloadavg()[0]
    sys.stderr.write(f"{text} (load average {load:.1f})\n")


async def _measure(asked: argparse.Namespace, directory: Path, figures: Figures) -> None:
    text = _text_tokens(asked.model)

    parts: list[tuple[str, Budget, range, Callable[[Run, int], None]]] = [
        ("steps", STEPS_KV, range(-1, asked.rounds) if asked.rounds else range(0), Run.steps),
        ("restarts", RESTART_KV, range(asked.restarts), Run.restart),
        ("replays", REPLAY_KV, range(asked.replays), Run.replay),
    ]
    for name, budget, rounds, measure in parts:
        if rounds:
            async with running_peers(asked, directory / name, budget) as peers:
                run = Run(peers, text, figures)
                # On a thread: Ctrl-C kills the peers, which ends it.
                await asyncio.to_thread(_take, asked, run, measure, rounds)


def _take(
    asked: argparse.Namespace, run: Run, measure: Callable[[Run, int], None], rounds: range
) -> None:
    for number in rounds:
        measure(run, number)
        _write(asked, run.figures, f"{measure.__name__}: {number + 1} of {rounds.stop} rounds")


def _text_tokens(model: Path) -> list[int]:
    """Return tokens of this project's documents: a model's answers vary more than on noise."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    return list(tokenizer(text, verbose=False)["input_ids"])


def _write(asked: argparse.Namespace, figures: Figures, what: str) -> None:
    """Print the progress, and save the measurements so far."""
    _say(what)
    if asked.json is not None:
        seconds = {
            line: {
                name: [asdict(took) for _, took in sorted(rounds.items())]
                for name, rounds in by_name.items()
            }
            for line, by_name in figures.seconds.items()
        }
        asked.json.write_text(json.dumps(seconds, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, and print tables of CPU seconds and of wall-clock seconds."""
    asked = _parser().parse_args()
    if asked.compiled:
        os.environ["COMPILE"] = "step"  # for the adapter
    here = str(asked.model)
    asked.engines = [
        Choice(OURS, sys.executable, here),
        Choice(REFERENCE, sys.executable, here),
        *(read_choice(text, here) for text in asked.engine),
    ]
    names = [choice.name for choice in asked.engines]
    with tempfile.TemporaryDirectory(prefix="peers-") as directory:
        figures = Figures()
        with suppress(KeyboardInterrupt):  # print the measurements so far
            run_until_signal(lambda: _measure(asked, Path(directory), figures))
    for clock in ("cpu", "wall"):
        sys.stdout.write(f"\n{clock}\n\n{figures.table(clock, names, OURS)}\n")
    num_answers = len(figures.ids)
    for name, number in figures.other_tokens(REFERENCE).items():
        sys.stdout.write(f"{name}: {number} of {num_answers} answers are not {REFERENCE}'s\n")


def read_choice(text: str, model: str) -> Choice:
    name, _, rest = text.partition("=")
    python, _, own_model = rest.partition(":")
    return Choice(name, python, own_model or model)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="directory of Transformers'")
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=PYTHON[:MODEL]",
        help="an engine with an adapter, the interpreter that has it, its form of the model",
    )
    parser.add_argument("--compiled", action="store_true", help='ours with model.compile = "step"')
    parser.add_argument("--rounds", type=int, default=9, help="of the steps")
    parser.add_argument("--restarts", type=int, default=9, help="rounds of restarts")
    parser.add_argument("--replays", type=int, default=3, help="rounds of the conversations")
    parser.add_argument("--json", type=Path, help="file for every round's figures")
    return parser


if __name__ == "__main__":
    main()
