"""Listening sockets: adopted, replaced when stale, and never in place of a file."""

import socket
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from inference_svc.core.errors import ListenError
from inference_svc.service.listening import prepare_sockets


def test_a_socket_in_use_is_refused_and_a_stale_one_replaced(short_dir):
    """Only a socket without a server may be removed."""
    path = short_dir / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        with pytest.raises(ListenError, match="in use"):
            prepare_sockets([f"unix:{path}"])
        assert path.exists()
    prepare_sockets([f"unix:{path}"])
    assert not path.exists()


def test_a_socket_far_from_any_directory_is_refused(short_dir):
    """One directory is created for it, and logged; a path that cannot exist is refused."""
    with pytest.raises(ListenError, match="there is no directory") as refused:
        prepare_sockets([f"unix:{short_dir}/a/b/s"])
    assert f"mkdir -p -m 700 {short_dir}/a/b" in str(refused.value)
    assert not list(short_dir.iterdir())
    with capture_logs() as lines:
        prepare_sockets([f"unix:{short_dir}/a/s"])
        prepare_sockets([f"unix:{short_dir}/a/t"])
    made = [line["directory"] for line in lines if line["event"] == "directory_made"]
    assert made == [str(short_dir / "a")]
    assert (short_dir / "a").stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_sockets_place_is_not_removed(short_dir):
    """It belongs to somebody else."""
    path = Path(short_dir / "s")
    path.write_text("precious")
    with pytest.raises(ListenError):
        prepare_sockets([f"unix:{path}"])
    assert path.read_text() == "precious"
