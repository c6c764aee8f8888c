"""Measures what only a GPU can show, in one command: `make gpu-report`.

Each part is a command with a time limit of its own, the most important first, all together within
nine minutes. A part that fails or takes too long is marked so, and the next one begins. `--tiny`
runs the same commands with models and lengths for a CPU: this checks that the report completes.

Writes OUT/gpu-report.md, a document of each part beside it (gpu-report.PART.json), and pictures.
"""

import argparse
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[2]
ALL_S = 540.0
LEAST_S = 1.0  # a part with less time than this is not begun
END_S = 10.0  # of a command, from SIGINT to its end
LAST_LINES = 60


@dataclass(frozen=True)
class Part:
    """One command.

    Attributes:
        name: also the stem of its files.
        shows: its explanation on the page.
        command: arguments of Python.
        limit_s: its time limit.
        is_bench: whether it writes a document and a picture.
    """

    name: str
    shows: str
    command: Sequence[str]
    limit_s: float
    is_bench: bool = True


def parts(*, is_tiny: bool, pairs: int = 0) -> list[Part]:
    """Return all parts, the most important first.

    Args:
        is_tiny: for a CPU.
        pairs: rounds of each bench; 0: as many as there is time for in nine minutes.
    """
    # Most of the tests' time is the compiling of kernels, on the CPU.
    processes = max(1, min(8, (os.cpu_count() or 1) // 2))
    many, few = (str(pairs or usual) for usual in (5, 3))
    if is_tiny:
        model = ["--random", "4x256", "--device", "cpu", "--threads", "1", "--pairs", "1"]
        large, ssd = model, model
        histories, decode, copies = ["100,200"], ["1,2", "32", "8"], ["64,128"]
        transport = ["--transport", "shm"]  # a CPU has no copier
        where = ["--random", "4x256", "--device", "cpu", "--history", "512"]
        overlap = ["--history", "100", "--new", "16", "--prompts", "40,60", "--batch", "2"]
        sharing = ["--sessions", "3", "--at-once", "2", "--prompt", "64", "--new", "4"]
    else:
        gpu = ["--device", "cuda", "--dtype", "bfloat16"]
        model = ["--random", "mistral-7b", *gpu, "--pairs", many]
        large = ["--random", "llama-13b", *gpu, "--pairs", few]
        ssd = ["--random", "mistral-7b", *gpu, "--pairs", few]
        histories, decode, copies = (
            ["1024,4096,12288,28672"],
            ["1,8,16,32", "1024", "64"],
            ["2048,16384"],
        )
        transport, where = ["--transport", "cuda_ipc"], []
        overlap = ["--history", "900", "--new", "100", "--batch", "16"]
        sharing = ["--sessions", "32", "--at-once", "8"]
    bench = ["-m", "inference_svc.cli.main", "bench"]
    all_parts = [
        Part(
            "tests",
            "kernels and copies are right on this device",
            [
                *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not long", "tests/gpu"),
                *("-n", str(processes)),
            ],
            150,
            is_bench=False,
        ),
        Part(
            "turns",
            "TTFT by history: recomputed, from kvd, resident (paper, Fig. 13)",
            [
                *(*bench, "turns", *model, "--splits", "", "--histories", *histories),
                *("--new", "256", "--re-pairs", "1", "--answer", "4"),
            ],
            120,
        ),
        Part(
            "copies",
            "loads and saves against the bus, both ways at once",
            [*bench, "copies", *model, "--histories", *copies],
            60,
        ),
        Part(
            "decode",
            "a step against reading weights and KV once, replayed from a graph and computed",
            [
                *(*bench, "decode", *model, "--batches", decode[0]),
                *("--history", decode[1], "--steps", decode[2]),
            ],
            80,
        ),
        Part(
            "prefill",
            "prompts against the matrix rate",
            [*bench, "prefill", *model, "--prompts", "40" if is_tiny else "1024,4096"],
            60,
        ),
        Part(
            "overlap",
            "loading hidden behind computing by read buffer; the price of saving (Fig. 17, 18)",
            [*bench, "overlap", *large, *overlap],
            110,
        ),
        Part(
            "turns-ssd",
            "TTFT of a history that is on SSD",
            [
                *bench,
                "turns",
                *ssd,
                "--tier",
                "ssd",
                "--splits",
                "160/30" if is_tiny else "900/100",
            ],
            60,
        ),
        Part(
            "turns-ipc",
            "TTFT of a history that kvd's copier copies",
            [
                *(*bench, "turns", *model, *transport, "--re-max-tokens", "1", "--splits", ""),
                *("--histories", "100" if is_tiny else "4096,28672", "--new", "256"),
                *("--answer", "4"),
            ],
            60,
        ),
        Part(
            "copies-ipc",
            "the same by kvd's copier (cuda_ipc); seconds of this process's CPU for each GB, too",
            [*bench, "copies", *model, *transport, "--histories", *copies],
            60,
        ),
        Part(
            "sharing",
            "sessions that begin with one prompt: on the same pages, or copied",
            [*bench, "sharing", *model, *sharing],
            60,
        ),
        Part(
            "kernels",
            "attention and copies by themselves",
            ["-m", "tests.gpu.kernels"],
            40,
            is_bench=False,
        ),
        Part(
            "where",
            "where the time of steps, prompts and turns goes",
            ["-m", "tests.gpu.where", *where],
            80,
            is_bench=False,
        ),
    ]
    return [part for part in all_parts if part.name != "kernels" or not is_tiny]


@dataclass(frozen=True)
class Outcome:
    """How a part ended.

    Attributes:
        state: "done", "failed", "too long" or "no time left".
        printed: its output, with tables.
    """

    part: Part
    state: str
    seconds: float
    printed: str = ""


def run(part: Part, out: Path, limit_s: float) -> Outcome:
    """Run a part to its end, or to its limit."""
    command = [sys.executable, *part.command]
    files = {kind: out / f"gpu-report.{part.name}.{kind}" for kind in ("json", "png", "log")}
    for file in files.values():
        file.unlink(missing_ok=True)
    if part.is_bench:
        command += ["--json", str(files["json"]), "--directory", str(out)]
        if importlib.util.find_spec("matplotlib") is not None:
            command += ["--plot", str(files["png"])]
    # So that it runs without an installation, too: kvd is started in other directories.
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
    began_s = time.monotonic()
    log = files["log"]
    with log.open("w+", encoding="utf-8") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=subprocess.STDOUT, env=environ, start_new_session=True
        )
        state = "done"
        try:
            if process.wait(limit_s):
                state = "failed"
        except subprocess.TimeoutExpired:
            state = "too long"
        finally:
            _end(process)
    seconds = time.monotonic() - began_s
    return Outcome(part, state, seconds, log.read_text(encoding="utf-8"))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all processes that it has started."""
    for ending in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, ending)
        except ProcessLookupError:
            return
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
        if ending == signal.SIGKILL:
            return


def page(outcomes: Sequence[Outcome], command: str) -> str:
    """Return the report as a page."""
    has_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if has_gpu else platform.processor() or "a CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    lines = [
        "# GPU report",
        "",
        f"{device}; Python {platform.python_version()}, {versions}; {when}",
        "",
        f"    {command}",
        "",
        "| part | shows | state | seconds |",
        "|---|---|---|---|",
        *(
            f"| {one.part.name} | {one.part.shows} | {one.state} | {one.seconds:.0f} |"
            for one in outcomes
        ),
    ]
    for one in outcomes:
        lines += ["", f"## {one.part.name}", "", f"    {' '.join(one.part.command)}", ""]
        last = [line for line in one.printed.splitlines() if line.strip()]
        tables = next((n for n, line in enumerate(last) if line.endswith(": medians")), None)
        lines += ["```", *(last[-LAST_LINES:] if tables is None else last[tables:]), "```"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all parts; return how many of them did not succeed."""
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--tiny", action="store_true", help="for a CPU")
    asked.add_argument("--out", type=Path, default=Path("docs/results"))
    asked.add_argument("--only", default="", help="names of parts, comma-separated")
    asked.add_argument("--seconds", type=float, default=ALL_S, help="of all parts together")
    asked.add_argument("--pairs", type=int, default=0, help="rounds of each bench")
    options = asked.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        asked.error("there is no GPU here: --tiny runs the report on a CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.tiny:
        os.environ["GPU_TESTS_DEVICE"] = "cuda"
    deadline_s = time.monotonic() + options.seconds
    outcomes: list[Outcome] = []
    names = [name for name in options.only.split(",") if name]
    for part in parts(is_tiny=options.tiny, pairs=options.pairs):
        if names and part.name not in names:
            continue
        sys.stderr.write(f"{part.name}: {part.shows}\n")
        limit_s = min(part.limit_s, deadline_s - time.monotonic() - END_S)
        outcome = Outcome(part, "no time left", 0.0)
        if limit_s >= LEAST_S:
            outcome = run(part, options.out, limit_s)
        sys.stderr.write(f"{part.name}: {outcome.state}, {outcome.seconds:.0f} s\n")
        outcomes.append(outcome)
        # After each part, so that the page survives whatever comes later.
        text = page(outcomes, " ".join(("python -m tests.gpu.report", *sys.argv[1:])))
        (options.out / "gpu-report.md").write_text(text, encoding="utf-8")
    return sum(one.state != "done" for one in outcomes)


if __name__ == "__main__":
    sys.exit(main())
