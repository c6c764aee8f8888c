"""Token identity while everything happens at once, in little memory: with reuse == recomputed.

Turns arrive at random, outgrow their rows, are preempted, moved, cancelled, abandoned and late,
over tiny tiers; steps mix prompts and answers. Scenes run until the counters show all of this.
"""

import random

import pytest

from tests.mixed_load import play
from tests.mixed_pair import Setting, mixed_pair

ALWAYS = ("preempted", "turns_cancelled", "expired", "forks", "length")
STORED = (*ALWAYS, "load_hits", "dram", "ssd")
NUM_SCENES = 40


async def test_residents_are_hit_moved_and_evicted(tiny_model, oracle):
    """Sessions in memory, in place or moved to a larger sequence KV, answer as if recomputed."""
    setting = Setting({"residents": True, "load_policy": "auto"})
    aims = (*ALWAYS, "hbm", "resident_hits", "moves", "residents_evicted")
    async with mixed_pair(tiny_model, setting) as pair:
        await play(pair, oracle, seed=1, num_turns=15, aims=aims)


async def test_histories_are_loaded_while_kvd_dies(tiny_model, oracle):
    """Histories from DRAM, from SSD, and those lost with a killed kvd answer as if recomputed."""
    setting = Setting(num_kills=2)
    async with mixed_pair(tiny_model, setting) as pair:
        aims = (*STORED, "kills")
        await play(pair, oracle, seed=2, num_turns=15, aims=aims, num_kills=setting.num_kills)


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param({"preload": "none", "saving": "sync"}, id="none-sync"),
        pytest.param(
            {"read_buffer_layers": 0, "residents": True}, id="0-residents", marks=pytest.mark.long
        ),
        pytest.param(
            {"read_buffer_layers": 1, "saving": "sync"}, id="1-sync", marks=pytest.mark.long
        ),
    ],
)
async def test_switches_for_measuring_change_no_token(tiny_model, oracle, cache):
    """Without pre-loading, with a small buffer for it and with synchronous saving: only slower."""
    async with mixed_pair(tiny_model, Setting(cache)) as pair:
        await play(pair, oracle, seed=3, num_turns=12, aims=("preempted", "load_hits", "dram"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 100 + NUM_SCENES))
async def test_mixed_scenes(tiny_model, oracle, seed):
    """Forty scenes of 60 turns or more, each with its own settings."""
    setting = random_setting(seed)
    aims = ["preempted", "length"]
    if setting.cache["residents"]:
        aims += ["resident_hits", "moves"]
    elif setting.cache["load_policy"] == "always" and setting.cache["saving"] != "off":
        aims += ["load_hits"]
    async with mixed_pair(tiny_model, setting) as pair:
        await play(pair, oracle, seed, num_turns=60, aims=aims, num_kills=setting.num_kills)


def random_setting(seed):
    """Draw a combination of settings, each most often at its usual value."""
    die = random.Random(seed)  # noqa: S311  # test data
    cache = {
        "residents": die.random() < 0.5,
        "load_policy": die.choice(("auto", "always", "always", "always", "never")),
        "preload": die.choice(("layers", "layers", "layers", "none")),
        "read_buffer_layers": die.choice((-1, -1, -1, 0, 1, 2)),
        "saving": die.choice(("async", "async", "async", "async", "sync", "off")),
    }
    scheduler = {
        "max_running": die.choice((1, 2, 3, 3, 6)),
        "max_loading": die.choice((1, 2, 4)),
        "step_tokens": die.choice((64, 64, 512)),
        "mixed_step_tokens": die.choice((16, 16, 64)),
        "kv_tokens": die.choice((700, 1500, 1500, 3000, 6000)),
        "answer_tokens": die.choice((1, 4, 4, 16)),
        "working_kv": die.choice(("contiguous", "pages")),
        "page_tokens": die.choice((1, 4, 16, 16, 100)),
    }
    return Setting(
        cache,
        scheduler,
        num_slots=die.choice((3, 6, 30)),
        num_extents=die.choice((4, 20, 100)),
        delay_s=die.choice((0.0, 0.0, 0.002, 0.01)),
        num_kills=die.choice((0, 0, 1, 3)),
    )
