"""`inference-svc up` as a developer runs it: two real processes by one command, and their ends."""

import asyncio
import os
import re
import signal
import sys
from contextlib import asynccontextmanager

import psutil
import pytest
from openai import AsyncOpenAI

from inference_svc.cli.up import ready_text
from tests.inference_processes import SERVICE
from tests.processes import KVD

DEADLINE_S = 120
SMALL = ("--dram", "64MB", "--ssd", "256MB", "--threads", "1")
OPENING = [
    {"role": "system", "content": "Keys and values are kept. " * 40},
    {"role": "user", "content": "What is kept?"},
]


PROGRAM = ("-P", "-m", "inference_svc.cli.main")
# The same command, its two processes forked with their imports done.
FORKING = """
import sys
from inference_svc.cli.main import main
from tests.warm_children import warm_children
from tests.warm_python import WarmPython

kvd, service = (int(sys.argv.pop(1)) for _ in range(2))
with warm_children(WarmPython(lent=kvd), WarmPython(lent=service)):
    main()
"""


def own_address():
    """Return an address that no other test process has: the loopback has 16 million."""
    pid = os.getpid()
    return f"127.{1 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}:8000"


async def spawn(directory, *flags, is_forking=False):
    """Start `inference-svc up` in a directory with a module of a standard name."""
    program, lent = PROGRAM, ()
    if is_forking:
        lent = (KVD.lent(), SERVICE.lent())
        program = ("-P", "-c", FORKING, *map(str, lent))
    elsewhere = directory / "elsewhere"
    (elsewhere / "shared").mkdir(parents=True, exist_ok=True)
    (elsewhere / "shared" / "__init__.py").write_text("raise AssertionError('imported')\n")
    arguments = ("up", "--state-dir", str(directory / "state"), *SMALL, *flags)
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *program, *arguments),
        pass_fds=lent,
        cwd=elsewhere,
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory), "KVD_DRAM__BYTES": "nonsense"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def start_refused(directory, *flags):
    """Return the exit code and the lines on stderr of a start that is refused."""
    process = await spawn(directory, *flags)
    async with asyncio.timeout(DEADLINE_S):
        _, stderr = await process.communicate()
    assert not list(directory.glob("inference-svc-up-*"))
    return process.returncode, stderr.decode().splitlines()


def forked_processes():
    """Return all processes that were forked for the test, by role."""
    forking = {"kvd": KVD, "inference_svc.cli.main": SERVICE}
    for warm in forking.values():
        warm.lent()  # now it is there
    return {
        name: set(psutil.Process(warm._process.pid).children()) for name, warm in forking.items()
    }


def has_ended(child):
    """Return whether a process has ended; its parent may not have collected it yet."""
    try:
        return child.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@asynccontextmanager
async def up(directory, *flags, is_forking):
    """Run one; yield it with its output, and its two children."""
    before = forked_processes() if is_forking else {}
    process = await spawn(directory, *flags, is_forking=is_forking)
    children = {}
    try:
        async with asyncio.timeout(DEADLINE_S):
            said = (await process.stdout.readuntil(b"kvd ls --runtime-dir ")).decode()
        own = psutil.Process(process.pid).children()
        children = {child.cmdline()[3]: child for child in own}
        for name, processes in forked_processes().items() if is_forking else ():
            (children[name],) = processes - before[name]
        yield process, said, children
        async with asyncio.timeout(DEADLINE_S):
            await process.wait()
        assert set(children) == {"kvd", "inference_svc.cli.main"}
        assert all(map(has_ended, children.values()))
        assert not list(directory.glob("inference-svc-up-*"))
    finally:
        for one in (process, *children.values()) if process.returncode is None else ():
            one.kill()
        await process.wait()


async def next_turn(address, messages):
    """Continue a conversation with the official client, which has no API key."""
    async with AsyncOpenAI(
        base_url=f"http://{address}/v1", api_key="sk-none", max_retries=0
    ) as client:
        model = (await client.models.list()).data[0].id
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=8, temperature=0
        )
    said = answer.choices[0].message.content
    messages += [
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And then?"},
    ]
    return answer.usage


def when(directory, name, event):
    """Return the time of an event in the log of one of them."""
    lines = (directory / "state" / f"{name}.log").read_text().splitlines()
    (line,) = [line for line in lines if f"] {event} " in f"{line} "]
    return line.partition(" [")[0]


@pytest.mark.parametrize(
    "is_forking",
    [True, pytest.param(False, marks=pytest.mark.long)],
    ids=["forked", "as a developer starts it"],
)
async def test_conversations_continue_over_a_restart(short_dir, is_forking):
    """Both processes end in order, and a second start is refused with a reason."""
    address, messages = own_address(), list(OPENING)
    flags = ("--openai", address)
    async with up(short_dir, *flags, is_forking=is_forking) as (process, said, _):
        assert said.startswith("Without --model: the demo model")
        assert f"http://{address}/v1" in said
        first = await next_turn(address, messages)
        second = await next_turn(address, messages)
        assert first.prompt_tokens_details.cached_tokens == 0
        assert second.prompt_tokens_details.cached_tokens >= first.prompt_tokens

        code, lines = await start_refused(
            short_dir / "other", "--state-dir", str(short_dir / "state")
        )
        assert (code, len(lines)) == (78, 1)
        assert f"another `inference-svc up` uses the state directory {short_dir}" in lines[0]
        assert "give another directory with --state-dir" in lines[0]

        code, lines = await start_refused(short_dir / "third", "--openai", address)
        assert (code, len(lines)) == (78, 1)
        assert lines[0].startswith(f"inference-svc: cannot listen on {address} (")
        assert lines[0].endswith("choose a free address of this machine")

        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    assert when(short_dir, "inference-svc", "stopped") < when(short_dir, "kvd", "kvd_draining")

    async with up(short_dir, *flags, is_forking=is_forking) as (process, _, children):
        third = await next_turn(address, messages)
        assert third.prompt_tokens_details.cached_tokens >= second.prompt_tokens
        children["kvd"].send_signal(signal.SIGKILL)
    assert process.returncode == 1
    (line,) = (await process.stderr.read()).decode().splitlines()
    last = (short_dir / "state" / "kvd.log").read_text().splitlines()[-1]
    assert line.startswith("inference-svc: kvd was ended by SIGKILL (")
    assert last[:300] in line
    assert line.endswith(f"read its log, {short_dir}/state/kvd.log")


async def test_sigterm_during_the_start_ends_both(short_dir):
    """There is no error: the end was requested."""
    process = await spawn(short_dir, "--openai", own_address())
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert b"Without --model" in await process.stdout.readline()
            while not (children := psutil.Process(process.pid).children()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the event is in another process
            process.send_signal(signal.SIGTERM)
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, stderr) == (0, b"")
    assert b"Ready" not in stdout
    assert not any(child.is_running() for child in children)


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (
            ("--model", "typo"),
            78,
            r"inference-svc: the model directory typo does not exist: give .*",
        ),
        (("--openai", "0.0.0.0:8000"), 78, r"inference-svc: .* 0\.0\.0\.0:8000, .*: listen on .*"),
        (("--dram", "1 kB or so"), 78, r"kvd: dram\.bytes.*"),
        (("--state-dir", "/dev/null/x"), 78, r"inference-svc: the state directory /dev/null/x .*"),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else None,
)
async def test_refused_starts(short_dir, flags, code, said):
    """One line of the refusing process, with its exit code; the other one does not stay."""
    found, lines = await start_refused(short_dir, "--openai", own_address(), *flags)
    assert (found, len(lines)) == (code, 1), lines
    assert re.fullmatch(said, lines[0])


def test_the_curl_command_for_a_socket_works(tmp_path):
    """A shell splits it into the intended words."""
    path = tmp_path / "a b" / "it's.sock"
    shown = ready_text("it's", [f"unix:{path}"], "unix:/run/g", tmp_path, tmp_path)
    assert f"  OpenAI's API  unix:{path}" in shown
    assert "curl --unix-socket '" in shown
    assert "http://localhost/v1/chat/completions" in shown
