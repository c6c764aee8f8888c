"""The demo as a user runs it: the included model and conversations, and a kill of kvd."""

import asyncio
import json
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.inference_processes import SERVICE
from tests.processes import KVD, run_cli

DEADLINE_S = 240


# The command on the first of its conversations, its processes forked with their imports done.
SAMPLE = """
import sys
from inference_svc.cli.main import main
from inference_svc.demo import cli
from tests.warm_children import warm_children
from tests.warm_python import WarmPython

number, kvd, service = (int(sys.argv.pop(1)) for _ in range(3))
shipped = cli.shipped_conversations()
cli.shipped_conversations = lambda: shipped[:number]
with warm_children(WarmPython(lent=kvd), WarmPython(lent=service)):
    main()
"""


async def demo(num_conversations, *flags):
    """Start `inference-svc demo` with so many conversations; None: with all."""
    program, lent = ("-m", "inference_svc.cli.main"), ()
    if num_conversations is not None:
        lent = (KVD.lent(), SERVICE.lent())
        program = ("-c", SAMPLE, *map(str, (num_conversations, *lent)))
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *program, "demo", *flags),
        pass_fds=lent,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("num_conversations", [1, pytest.param(None, marks=pytest.mark.long)])
async def test_the_demo_shows_identical_answers_and_reuse(num_conversations):
    """Nearly all history is reused, also after kvd was killed; then kvd's commands are tried."""
    process = await demo(num_conversations, "--json", "--keep-running")
    try:
        async with asyncio.timeout(DEADLINE_S):
            document = await _first_document(process.stdout)
            said = (await process.stderr.readuntil(b"chat")).decode()
            runtime_dir = re.search(r"--runtime-dir (\S+)", said).group(1)
            await _look_around(runtime_dir, document["num_sessions"])
    finally:  # kill it even if the test failed: it would keep three processes running
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        exit_code = await process.wait()
    assert exit_code == 0
    assert not Path(runtime_dir).parent.exists()
    assert document["identical"]
    assert (document["passed"], document["shortfalls"]) == (True, [])
    assert document["reused_share"] >= 0.9
    assert document["reused_share_after_kill"] >= 0.9
    turns = document["turns"]
    assert len(turns) == 5 * document["num_sessions"] >= 5 * (num_conversations or 6)
    assert all(turn["output_tokens"] >= 32 for turn in turns)
    # DRAM was lost with kvd: a block in DRAM was read ahead while the turn waited.
    found = [set(turn["tiers"]) for turn in turns if turn["after_kill"]]
    assert all(tiers and tiers <= {"ssd", "dram"} for tiers in found)


async def _first_document(stream):
    text = ""
    while True:
        line = (await stream.readline()).decode()
        assert line, f"the demo ended: {text}"
        text += line
        if line.rstrip() == "}":
            return json.loads(text)


async def _look_around(runtime_dir, num_sessions):
    """Try the operator's commands, for people and as JSON."""
    where = ("--runtime-dir", runtime_dir)
    code, text, _ = await run_cli("ls", *where, "--json")
    sessions = json.loads(text)["sessions"]
    assert code == 0
    assert len(sessions) >= num_sessions
    name = sessions[-1]["session"]["session_id"]
    for command in (["ls"], ["show", name], ["stats"]):
        code, text, _ = await run_cli(*command, *where)
        assert (code, bool(text.strip())) == (0, True)
        code, text, _ = await run_cli(*command, *where, "--json")
        assert code == 0
        assert json.loads(text)
    code, text, _ = await run_cli("flush", name, *where, "--json")
    assert code == 0
    assert json.loads(text)["sessions"] == 1
    code, _, error = await run_cli("show", name, *where)
    assert code == 3
    assert name in error
