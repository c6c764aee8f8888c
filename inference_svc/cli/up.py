"""`inference-svc up`: one command that runs kvd and a service on a developer's machine.

Both are child processes with sockets of their own, so that other services on the machine are not
disturbed. At the end the service stops first, and kvd writes its KV to SSD before it stops. So
conversations continue with the same state directory.
"""

import asyncio
import fcntl
import json
import os
import shlex
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference_svc.installation import SHIPPED_MODEL, default_state_dir, require_engine
from shared.access.addresses import UNIX, is_unix
from shared.types.errors import ConfigError

# Imported where they are used, so that --help does not wait for gRPC.
if TYPE_CHECKING:
    from inference_svc.pair import Pair
    from shared.children.child_process import ChildFailedError

EXIT_ENDED = 1  # exit code if a child has ended by itself
OPENAI = "127.0.0.1:8000"
DRAM, SSD = "2GB", "10GB"  # sizes that a developer's machine can spare
STATE = "up"  # subdirectory of the default state directory, which itself is that of `serve`
LOCK_FILE = "up.lock"
OWN_WORDS = ("kvd: ", "inference-svc: ")  # prefixes of the error line of a child's own refusal


class UpRunsError(ConfigError):
    """Another running `up` uses the state directory."""

    reason = "up_runs"


class UpStateError(ConfigError):
    """The state directory cannot be created or written."""

    reason = "up_state"


def up(
    model: Annotated[
        Path | None, typer.Option(help="Model directory or GGUF file; default: the demo model.")
    ] = None,
    openai: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="OpenAI's API: 127.0.0.1:PORT or unix:/path; repeat for more addresses.",
            show_default=OPENAI,
        ),
    ] = None,
    dram: Annotated[
        str, typer.Option(metavar="SIZE", help='DRAM of kvd, "auto": a quarter of what is free.')
    ] = DRAM,
    ssd: Annotated[
        str, typer.Option(metavar="SIZE", help='Disk of kvd, "auto": a quarter of what is free.')
    ] = SSD,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Conversations, KV and logs.", show_default="up, below the one of `serve`"
        ),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or of several cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads; 0: torch's choice.")] = None,
) -> None:
    """Start kvd and a service for programs on this machine; Ctrl-C ends both.

    Local programs need no account, and other machines have no access. With the same state
    directory, conversations continue after a restart without recomputation. `kvd serve` and
    `inference-svc serve` have more settings.
    """
    from inference_svc.pair import Pair
    from inference_svc.runtime.model.model_directory import check_model
    from shared.children.child_process import ChildFailedError

    require_engine()
    path, addresses = model or SHIPPED_MODEL, openai or [OPENAI]
    check_model(path)
    kvd_flags = _flags({"--dram": dram, "--ssd": ssd, "--log-format": "text"})
    service_flags = _flags(
        {
            "--model": path,
            "--dtype": dtype,
            "--device": device,
            "--threads": threads,
            "--log-format": "text",
        }
    )
    service_flags += [word for address in addresses for word in ("--openai", address)]
    state = (state_dir or default_state_dir() / STATE).absolute()
    with _locked_directory(state), _runtime_dir() as runtime_dir:
        pair = Pair(runtime_dir, state, kvd_flags, service_flags)
        if model is None:
            typer.echo("Without --model: the demo model, which is small and knows nothing.")
        typer.echo(f"Starting kvd and inference-svc, whose logs are in {state} …")
        try:
            ended = asyncio.run(_run(pair, addresses))
        except ChildFailedError as error:
            typer.echo(_failure_line(error), err=True)
            raise typer.Exit(max(EXIT_ENDED, error.code or 0)) from error
    if ended is not None:
        typer.echo(f"inference-svc: {ended}", err=True)
        raise typer.Exit(EXIT_ENDED)


def _flags(options: Mapping[str, object]) -> list[str]:
    """Return the command line of options, without those whose value is None."""
    with_values = {name: str(value) for name, value in options.items() if value is not None}
    return [word for option in with_values.items() for word in option]


def _failure_line(error: "ChildFailedError") -> str:
    """Return the error line of a failed start; if the child refused it itself, the child's line."""
    is_refusal = (error.code or 0) > 0 and error.last_line.startswith(OWN_WORDS)
    return error.last_line if is_refusal else f"inference-svc: {error}"


@contextmanager
def _locked_directory(directory: Path) -> Iterator[None]:
    """Create and lock the state directory inside the block; delete the logs of earlier runs.

    Raises:
        UpRunsError: another `up` has locked it.
        UpStateError: it cannot be created or written.
    """
    remedy = "give another directory with --state-dir"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UpStateError(
            f"the state directory {directory} cannot be used ({error.strerror})", remedy
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UpRunsError(
                f"another `inference-svc up` uses the state directory {directory}",
                f"end it, or {remedy}",
            ) from error
        for log in directory.glob("*.log"):
            log.unlink()
        yield
    finally:
        os.close(lock)


@contextmanager
def _runtime_dir() -> Iterator[Path]:
    """Make a directory for sockets, private to this user, and remove it after the block."""
    own = os.environ.get("XDG_RUNTIME_DIR", "")
    place = own if os.access(own, os.W_OK | os.X_OK) else None
    with tempfile.TemporaryDirectory(prefix="inference-svc-up-", dir=place) as name:
        yield Path(name)


async def _run(pair: "Pair", addresses: Sequence[str]) -> "ChildFailedError | None":
    """Run both children until a signal, or until one of them ends by itself.

    Returns:
        None after a signal; else the error of the child that has ended.

    Raises:
        ChildFailedError: a child does not start.
    """
    serving = asyncio.create_task(_serve(pair, addresses))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
    try:
        await asyncio.wait((serving,))
        if serving.cancelled():
            typer.echo("\nEnding both …")
    finally:
        await pair.stop()
    return None if serving.cancelled() else serving.result()


async def _serve(pair: "Pair", addresses: Sequence[str]) -> "ChildFailedError":
    """Start both children, print where they are, and return when one of them ends by itself."""
    from inference_svc.client import InferenceClient
    from inference_svc.pair import wait_for_first_end

    await pair.start()
    async with InferenceClient(pair.address) as client:
        name = (await client.get_model()).name
    typer.echo(ready_text(name, addresses, pair.address, pair.kvd_dir, pair.logs))
    return await wait_for_first_end((pair.kvd, pair.service))


def ready_text(
    model: str, addresses: Sequence[str], grpc_address: str, kvd_dir: Path, logs: Path
) -> str:
    """Return the text about a ready pair: addresses, directories, and commands to try."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    where, base = _curl_target(addresses[0])
    lines = [
        f"\nReady: {model}. Ctrl-C ends both.\n",
        *(f"  OpenAI's API  {_address_line(address)}" for address in addresses),
        f"  gRPC          {grpc_address}",
        f"  kvd           {kvd_dir}",
        f"  logs          {logs}",
        "\nTry, in another terminal:\n",
        f"  curl {where}{base}/chat/completions -d {shlex.quote(json.dumps(body))}",
        f"  inference-svc chat --address {grpc_address}",
        f"  kvd ls --runtime-dir {kvd_dir}",
    ]
    return "\n".join(lines)


def _address_line(address: str) -> str:
    return address if is_unix(address) else f"http://{address}/v1   with any key, from here only"


def _curl_target(address: str) -> tuple[str, str]:
    """Return curl's options for an address of the API, and the API's URL there."""
    if not is_unix(address):
        return "", f"http://{address}/v1"
    path = address.removeprefix(UNIX)
    return f"--unix-socket {shlex.quote(path)} ", "http://localhost/v1"
