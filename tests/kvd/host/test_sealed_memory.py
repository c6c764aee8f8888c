"""Memory that cannot be resized: it is recognised, and a failure leaves no descriptor."""

import fcntl
import os

import psutil
import pytest

from kvd.host.sealed_memory import is_sealed, sealed_memfd


@pytest.mark.parametrize(
    ("seals", "expected"),
    [
        (0, False),
        (fcntl.F_SEAL_SHRINK, False),
        (fcntl.F_SEAL_GROW, False),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, True),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, True),
    ],
)
def test_memory_is_sealed_if_it_can_neither_shrink_nor_grow(seals, expected):
    """Other seals do not matter."""
    fd = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    assert is_sealed(fd) is expected
    os.close(fd)


def test_a_file_is_not_sealed(tmp_path):
    """Only memory can be."""
    with (tmp_path / "file").open("wb") as file:
        assert not is_sealed(file.fileno())


def test_memory_that_cannot_be_allocated_leaves_no_descriptor():
    """The error has the reason."""
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="Invalid argument"):
        sealed_memfd("arena", -1)
    assert psutil.Process().num_fds() == before
