"""`python -m kvd.copier DEVICE CONTROL_FD`: started by kvd, ended by the end of its socket."""

import os
import signal
import socket
import sys

from kvd.copier.control import CONTROL, Ready, Unusable
from kvd.copier.copier import Copier
from kvd.copier.gpu import CudaGpu
from shared.cuda.driver_calls import DriverError
from shared.process.dumps import forbid_dumps
from shared.process.log import configure_logging


def main(device: str, control_fd: str) -> None:
    """Copy for engines until kvd closes the socket."""
    forbid_dumps()
    for number in (signal.SIGTERM, signal.SIGINT):  # of all of kvd's processes: kvd ends us
        signal.signal(number, signal.SIG_IGN)
    configure_logging("info", json=None)
    control = socket.socket(fileno=int(control_fd))
    try:
        gpu = CudaGpu(device)
    except ImportError:
        missing = "the package cuda-bindings is not installed"
        CONTROL.send(control, Unusable(missing, "pip install 'cachedattention[cuda]' for kvd, too"))
        return
    except DriverError as error:
        CONTROL.send(control, Unusable(str(error), "let kvd see the GPU: docs/gpu.md"))
        return
    CONTROL.send(control, Ready())
    try:
        Copier(gpu, control).run()
    finally:
        # No thread is waited for: what is under way ends with the process, and engines know it.
        os._exit(0)


main(*sys.argv[1:])
