"""A bench's own kvd: it serves inside the block, and SSD survives its end."""

import pytest

from shared.children.child_kvd import running_child_kvd
from shared.children.child_process import ChildFailedError
from tests.synthetic_engine import key_of

SETTINGS = """
[dram]
bytes = "16MB"
keep = "none"
prefault = false
[ssd]
bytes = "16MB"
"""


async def test_it_serves_until_the_end_of_the_block(short_dir, tmp_path):
    """It is empty, clean and idle; at the end its process is gone."""
    async with running_child_kvd(SETTINGS, tmp_path, short_dir, tmp_path / "state") as kvd:
        stats = await kvd.stats()
        assert stats.version
        assert not stats.layouts
        await kvd.until_clean()
        await kvd.until_quiet()
        await kvd.flush()
        with pytest.raises(Exception, match=r"no session|not stored"):
            await kvd.flush(key_of("nobody"))
        process = kvd.process
        assert process.cpu_s() > 0
    assert (tmp_path / "state" / "manifest.db").exists()
    assert (tmp_path / "kvd.log").stat().st_size > 0


async def test_invalid_settings_end_the_block_before_it_begins(short_dir, tmp_path):
    """The error is the child's, with its log."""
    with pytest.raises(ChildFailedError):
        async with running_child_kvd("[dram]\nbytes = -1\n", tmp_path, short_dir, tmp_path):
            pytest.fail("it does not start")
