"""Counts the modules, functions and returns that a turn passes until its history is loaded.

    python -m tests.traced_turn [--verbose]

Both processes run as they are, on the demo's model, with a profile function in each of their
threads. A session's first turn is computed and stored, its second one is traced: in kvd the code
that PrepareLoad and CompleteLoad run, in the service all code from the call of SubmitTurn until kvd
has answered CompleteLoad. It counts

- modules: files of this project that are entered (without generated stubs);
- functions of these modules;
- returns: calls into a module that was left before, to which a reader has to return as well.
"""

import argparse
import asyncio
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

OURS = ("inference_svc.", "kvd.", "shared.")
NOT_OURS = ("shared.pb.",)
# By process: the function whose call begins what is counted, the one whose last return ends it, and
# whether only the tasks that these two run in are counted.
SPANS = {
    "inference-svc": ("SubmitTurn", "complete_load", False),
    "kvd": ("PrepareLoad", "CompleteLoad", True),
}
MODEL = Path(__file__).parents[1] / "inference_svc/demo/model"
WORDS = "The cat sat on the mat and looked at the rain. " * 12
START_S = 120.0
SAVED_S = 60.0

Call = tuple[str, str]  # module and function


class Trace:
    """The calls between a first and a last function, in order; written at a signal."""

    def __init__(self, first: str, last: str, is_of_tasks: bool, path: Path) -> None:
        self._first, self._last, self._path = first, last, path
        self._tasks: set[object] | None = set() if is_of_tasks else None
        self._lock = threading.RLock()  # signals come while the main thread has it, too
        self._calls: list[Call] = []
        self._frames: set[FrameType] = set()  # a coroutine that resumes is no new call
        self._is_on = False
        self._end = 0

    def install(self) -> None:
        """Watch every thread from now on. SIGUSR1 clears the trace, SIGUSR2 writes it."""
        signal.signal(signal.SIGUSR1, lambda *_: self._forget())
        signal.signal(signal.SIGUSR2, lambda *_: self._write())
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def _see(self, frame: FrameType, event: str, _argument: Any) -> None:
        module = frame.f_globals.get("__name__") or ""
        if event not in {"call", "return"} or not module.startswith(OURS):
            return
        if module.startswith(NOT_OURS):
            return
        name = frame.f_code.co_name
        with self._lock:
            if event == "return":
                if self._is_on and name == self._last:
                    self._end = len(self._calls)
                return
            if self._tasks is not None and name in {self._first, self._last}:
                self._tasks.add(_current_task())
            self._is_on |= name == self._first
            is_counted = self._tasks is None or _current_task() in self._tasks
            if self._is_on and is_counted and frame not in self._frames:
                self._frames.add(frame)
                self._calls.append((module, frame.f_code.co_qualname))

    def _forget(self) -> None:
        with self._lock:
            self._calls.clear()
            self._frames.clear()
            self._is_on, self._end = False, 0

    def _write(self) -> None:
        with self._lock:
            written = json.dumps(self._calls[: self._end])
        self._path.with_suffix(".part").write_text(written, encoding="utf-8")
        self._path.with_suffix(".part").rename(self._path)


def _current_task() -> object:
    """Return the running task; a new object in a thread without a loop, equal to none."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return object()


def run_traced(command: str, path: Path, arguments: Sequence[str]) -> None:
    """Run the command in this process, traced."""
    Trace(*SPANS[command], path).install()
    script = shutil.which(command, path=Path(sys.executable).parent)
    assert script is not None, f"{command} is not installed"
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Trace a turn and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verbose", action="store_true", help="list the calls in their order")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ca-") as directory:
        traces = trace_turn(Path(directory))
    print(f"{'':14} {'modules':>8} {'functions':>10} {'returns':>8}")
    for command, calls in traces.items():
        modules, functions, returns = count(calls)
        print(f"{command:14} {modules:8} {functions:10} {returns:8}")
    if options.verbose:
        for command, calls in traces.items():
            print(f"\n{command}:", *(f"  {module}.{name}" for module, name in calls), sep="\n")


def count(calls: Sequence[Call]) -> tuple[int, int, int]:
    """Count modules, functions and returns of a trace."""
    modules = [module for module, _ in calls]
    entered = [
        module for before, module in zip(["", *modules], modules, strict=False) if module != before
    ]
    return len(set(modules)), len(set(calls)), len(entered) - len(set(entered))


def trace_turn(directory: Path) -> dict[str, list[Call]]:
    """Run the pair and two turns of a session; return the calls of the second one by process."""
    import grpc

    from shared.pb.inference.v1 import inference_pb2 as pb
    from shared.pb.inference.v1 import inference_pb2_grpc

    run, socket = directory / "run", f"unix:{directory}/s"
    arguments = {
        "kvd": ("serve", "--runtime-dir", str(run), "--state-dir", str(directory / "kvd")),
        "inference-svc": (
            *("serve", "--model", str(MODEL), "--dtype", "float32", "--threads", "1"),
            *("--listen", socket, "--state-dir", str(directory / "state")),
            *("--kvd-runtime-dir", str(run), "--load-policy", "always", "--no-residents"),
        ),
    }
    with ExitStack() as stack:
        children = {}
        for command, given in arguments.items():
            children[command] = _start(command, directory, given, stack)
            _await_serving(f"unix:{run}/operator.sock" if command == "kvd" else socket)
        channel = stack.enter_context(grpc.insecure_channel(socket))
        stub = inference_pb2_grpc.InferenceStub(channel)

        def say(text: str) -> None:
            sampling = pb.Sampling(max_tokens=1)
            request = pb.SubmitTurnRequest(session_id="traced", text=text, sampling=sampling)
            for _ in stub.SubmitTurn(request):
                pass

        say(WORDS)
        _await_saved(stub)
        for child in children.values():
            child.send_signal(signal.SIGUSR1)
        time.sleep(1)  # the handlers run between two instructions of the main thread
        say("And then?")
        for child in children.values():
            child.send_signal(signal.SIGUSR2)
        return {command: _read(directory / f"{command}.json") for command in arguments}


def _start(
    command: str, directory: Path, arguments: Sequence[str], stack: ExitStack
) -> "subprocess.Popen[bytes]":
    log = stack.enter_context((directory / f"{command}.log").open("wb"))
    traced = (
        sys.executable,
        "-m",
        "tests.traced_turn",
        "--child",
        command,
        str(directory / f"{command}.json"),
    )
    environ = {**os.environ, "KVD_DRAM__KEEP": "none", "KVD_DRAM__BYTES": "64MiB"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    child = subprocess.Popen((*traced, *arguments), env=environ, stdout=log, stderr=log)
    stack.callback(child.wait)
    stack.callback(child.terminate)
    return child


def _await_serving(address: str) -> None:
    """Wait until the process serves."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    serving = health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        while stub.Check(request, timeout=START_S, wait_for_ready=True).status != serving:
            time.sleep(0.1)


def _await_saved(stub: Any) -> None:
    """Wait until kvd has the first turn: two polls with the same number of saved tokens."""
    from shared.pb.inference.v1 import inference_pb2 as pb

    deadline, before = time.monotonic() + SAVED_S, -1
    while time.monotonic() < deadline:
        saved = sum(
            number
            for name, number in stub.GetModel(pb.GetModelRequest()).counters.items()
            if "saved" in name or "stored" in name
        )
        if saved and saved == before:
            return
        before = saved
        time.sleep(0.5)
    sys.exit("traced_turn: the first turn was not saved")


def _read(path: Path) -> list[Call]:
    deadline = time.monotonic() + SAVED_S
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return [(module, name) for module, name in json.loads(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        run_traced(sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
    else:
        main()
