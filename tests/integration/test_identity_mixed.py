"""Token identity while everything happens at once, in little memory: with reuse == recomputed.

Turns arrive at random, outgrow their rows, are preempted by urgent ones, moved, cancelled, dropped
and late, over tiny tiers; steps mix prompts and answers. Scenes run until the counters show it.
"""

import random

import pytest

from tests.mixed_load import play
from tests.mixed_pair import Setting, mixed_pair

ALWAYS = ("preempted", "turns_cancelled", "expired", "forks", "length")
STORED = (*ALWAYS, "load_hits", "dram", "ssd")
NUM_SCENES = 40


async def test_residents_are_hit_moved_and_evicted(tiny_model, oracle):
    """What is kept in memory, in place or moved to a larger sequence KV, is as if recomputed."""
    setting = Setting({"residents": True, "load_policy": "auto"})
    aims = (*ALWAYS, "hbm", "resident_hits", "moves", "residents_evicted")
    async with mixed_pair(tiny_model, setting) as pair:
        await play(pair, oracle, seed=1, num_turns=15, aims=aims)


async def test_histories_are_loaded_while_kvd_dies(tiny_model, oracle):
    """What comes from DRAM, from SSD, or from nowhere because kvd was killed, is so, too."""
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
async def test_what_is_switched_for_measuring_changes_no_token(tiny_model, oracle, cache):
    """No pre-loading, pre-loading into a small buffer and synchronous saving are slower only."""
    async with mixed_pair(tiny_model, Setting(cache)) as pair:
        await play(pair, oracle, seed=3, num_turns=12, aims=("preempted", "load_hits", "dram"))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 100 + NUM_SCENES))
async def test_mixed_scenes(tiny_model, oracle, seed):
    """Forty scenes of 60 turns or more, each with settings of its own."""
    setting = random_setting(seed)
    aims = ["preempted", "length"]
    if setting.cache["residents"]:
        aims += ["resident_hits", "moves"]
    elif setting.cache["load_policy"] == "always" and setting.cache["saving"] != "off":
        aims += ["load_hits"]
    async with mixed_pair(tiny_model, setting) as pair:
        await play(pair, oracle, seed, num_turns=60, aims=aims, num_kills=setting.num_kills)


def random_setting(seed):
    """Any combination of what can be set, more often as it usually is."""
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
