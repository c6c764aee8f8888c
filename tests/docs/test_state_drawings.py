"""The READMEs' drawings of states are generated from the tables in the code."""

import re
from pathlib import Path

import pytest

from inference_svc.core.scheduling.request import REQUEST_MOVES
from kvd.core.state.block import BLOCK_MOVES
from kvd.core.state.leases import LEASE_MOVES
from kvd.core.state.slots import SLOT_MOVES
from kvd.engines.attached import ENGINE_MOVES
from shared.kvd_client.connection import CONNECTION_MOVES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("readme", "machines"),
    [
        ("kvd", [BLOCK_MOVES, SLOT_MOVES, LEASE_MOVES, ENGINE_MOVES, CONNECTION_MOVES]),
        ("inference_svc", [REQUEST_MOVES]),
    ],
)
def test_a_readme_draws_the_tables(readme, machines):
    """It has no other drawings of states."""
    text = (ROOT / readme / "README.md").read_text(encoding="utf-8")
    drawn = re.findall(r"```mermaid\n(stateDiagram.*?)\n```", text, re.DOTALL)
    assert drawn == [machine.diagram() for machine in machines]
