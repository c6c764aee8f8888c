"""The values of a scrape: those of real caches, with the labels of the table."""

from prometheus_client.parser import text_string_to_metric_families

from kvd.engines.copiers import Copiers
from kvd.metrics.table import METRICS
from kvd.metrics.values import LAYOUT_CHARS, Sources, make_exporter
from shared.serving.http_connections import ConnectionMetrics
from shared.serving.rpc_observer import RpcMetrics
from shared.version import __version__
from tests.kvd.rpc.service_bench import serving, settings

LAYOUT = "layout"


def scrape_samples(served, directory):
    """Return every sample of a scrape: (name, labels) → value."""
    sources = Sources(
        served.caches,
        served.caches._engines,
        Copiers(is_enabled=True),
        RpcMetrics(),
        settings(directory),
        ConnectionMetrics(),
    )
    text, _ = make_exporter(sources).render("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


async def test_a_scrape_has_stored_sessions_and_attached_engines(tmp_path):
    """By layout and tier, at that moment."""
    async with serving(tmp_path) as served:
        label = (LAYOUT, served.cache.layout.fingerprint[:LAYOUT_CHARS])
        before = scrape_samples(served, tmp_path)
        assert before["kvd_sessions", (label,)] == 0
        assert before["kvd_engines", (label,)] == 1
        await served.store()
        await served.load()
        after = scrape_samples(served, tmp_path)
        assert after["kvd_sessions", (label,)] == 1
        assert after["kvd_leases", (("kind", "load"), label)] == 1
        assert after["kvd_tier_blocks", (label, ("tier", "dram"))] == 1
        moved = after["kvd_moved_bytes_total", (label, ("move", "store"))]
        assert moved == served.cache.layout.block_bytes
        assert after["kvd_layout_unavailable", (label,)] == 0


async def test_only_rows_of_the_table_are_exported(tmp_path):
    """With their types; the release is among them."""
    async with serving(tmp_path) as served:
        found = scrape_samples(served, tmp_path)
        names = {name for name, _ in found}
        allowed = METRICS.exported_names()
        assert {name for name in names if name not in allowed and "_created" not in name} == set()
        (build,) = [labels for name, labels in found if name == "kvd_build_info"]
        assert ("version", __version__) in build
