"""How long sessions rest and are missed, in the core's own time."""

from kvd.core.records.records import Tier
from kvd.core.state.outbox import MOST_EVICTED, CacheHistograms
from shared.types.session_key import SessionKey
from shared.types.units import NS_PER_S


def key_of(name: str) -> SessionKey:
    """A session."""
    return SessionKey("default", "m", name)


def values(histogram):
    """Label → (how many, their sum)."""
    return {labels: (s.count, s.total) for labels, s in histogram.series.items()}


def test_rest_and_regret():
    """What rested before it went, and was gone before it was asked for, counts by tier, once."""
    histograms = CacheHistograms()
    histograms.on_evict(key_of("a"), Tier.DRAM, last_access_ns=0, now_ns=20 * NS_PER_S)
    histograms.on_evict(key_of("a"), Tier.SSD, last_access_ns=0, now_ns=30 * NS_PER_S)
    histograms.on_evict(key_of("b"), Tier.DRAM, last_access_ns=0, now_ns=40 * NS_PER_S)
    for name in ("a", "a", "c"):
        histograms.on_load(key_of(name), now_ns=90 * NS_PER_S)
    assert values(histograms.rest_before_evict_s) == {("dram",): (2, 60.0), ("ssd",): (1, 30.0)}
    assert values(histograms.gone_before_asked_s) == {("ssd",): (1, 60.0)}


def test_memory_is_bounded():
    """Only the sessions evicted last are remembered."""
    histograms = CacheHistograms()
    for index in range(MOST_EVICTED + 1):
        histograms.on_evict(key_of(str(index)), Tier.DRAM, 0, index)
    histograms.on_load(key_of("0"), MOST_EVICTED)
    assert not histograms.gone_before_asked_s.series
    histograms.on_load(key_of("1"), MOST_EVICTED)
    assert histograms.gone_before_asked_s.series
