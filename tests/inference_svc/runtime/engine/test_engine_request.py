"""A turn inside the engine: what is known of its load."""

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
def test_a_load_is_as_slow_as_its_slowest_tier(tiers, slowest):
    """Without one that the store has begun it is a copy of a resident's KV."""
    begun = None if tiers is None else BegunLoad(tier_tokens=Counter(tiers))
    assert Load(ADMISSION, begun, LayerGate(2)).tier == slowest


def test_what_copies_nothing_is_of_no_tier():
    """All of its layers are there when it is announced; no load is a guide to how long it takes."""
    assert Load(ADMISSION).tier is None
    assert Load(ADMISSION, BegunLoad(tier_tokens=Counter(dram=3))).tier is None
