"""Under load with kills of kvd and hostile clients, every good client is served."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.load.hostile import EXPECTED
from tests.load.load import MIN_KILLS, Load, LoadShape

MINUTES = float(os.environ.get("LOAD_MINUTES", "10"))
CLIENTS = int(os.environ.get("LOAD_CLIENTS", "200"))
KILL_S = 30.0
SHORT = LoadShape(num_clients=50, seconds=2.0, kill_s=1.0, num_judged=4)
LONG = LoadShape(CLIENTS, 60 * MINUTES, KILL_S, num_judged=100)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SHORT, id="short"),
        pytest.param(
            LONG,
            id="long",
            marks=[pytest.mark.long, pytest.mark.timeout(60 * MINUTES + 1200)],
        ),
    ],
)
async def test_no_turn_fails_under_load(tiny_model, oracle, shape):
    """Neither kills of kvd, a full queue nor hostile clients cause failures or other answers."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    load = Load(tiny_model, directory, shape)
    async with load.running():
        await load.play()
        counters = await load.counters()
        harm = {kind.__name__: seen for kind, seen in load.harm.items()}
        told = {"good": load.seen, "least": load.least, "hostile": harm, "counters": counters}
        print(json.dumps(told))
        assert not load.failed, (len(load.failed), load.failed[:20])
        assert load.seen["answered"] > shape.num_clients
        assert load.seen["kills"] >= MIN_KILLS
        for kind, expected in EXPECTED.items():
            assert load.harm[kind][expected], (kind.__name__, load.harm[kind])
        assert not await load.differing(oracle, shape.num_judged)
        await load.until_settled()
    assert not errors_of(load.service.log_path), directory
    shutil.rmtree(directory)


def errors_of(log_path: Path) -> list[str]:
    """Return the lines of a log that need attention."""
    lines = log_path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if '"level": "error"' in line or "Traceback" in line]
