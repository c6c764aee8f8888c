"""How the commands of `kvd` reach a daemon."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvd.operator_client import OperatorClient, connect
from shared.runtime_dir import default_runtime_dir


@contextmanager
def open_client(runtime_dir: Path | None) -> Iterator[OperatorClient]:
    """Open a channel to the kvd that the command line names; it connects at the first call."""
    with connect(runtime_dir or default_runtime_dir()) as client:
        yield client
