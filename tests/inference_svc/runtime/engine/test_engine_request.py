"""A turn inside the engine: facts about its load."""

from collections import Counter

import pytest

from inference_svc.core.scheduling.request import Request
from inference_svc.core.scheduling.step_plan import Admission
from inference_svc.runtime.engine.engine_request import Load
from inference_svc.runtime.kv.layer_gate import LayerGate
from inference_svc.runtime.store.session_store import BegunLoad
from shared.types.session_key import SessionKey

ADMISSION = Admission(Request(1, SessionKey("t", "m", "s"), [1, 2], 1, 0, 0))


@pytest.mark.parametrize(
    ("tiers", "slowest"),
    [(None, "hbm"), ({}, None), ({"dram": 9}, "dram"), ({"ssd": 1, "dram": 9}, "ssd")],
)
def test_a_load_has_the_slowest_tier(tiers, slowest):
    """Without one from the store it is a copy of a resident's KV."""
    begun = None if tiers is None else BegunLoad(tier_tokens=Counter(tiers))
    assert Load(ADMISSION, begun, LayerGate(2)).tier == slowest


def test_a_load_without_copies_has_no_tier():
    """All of its layers are complete at once; it says nothing about the duration of loads."""
    assert Load(ADMISSION).tier is None
    assert Load(ADMISSION, BegunLoad(tier_tokens=Counter(dram=3))).tier is None
