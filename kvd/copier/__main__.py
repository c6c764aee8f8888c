"""`python -m kvd.copier DEVICE CONTROL_FD`: started by kvd, ends when its socket is closed."""

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
    """Copy for engines until kvd closes the socket.

    Args:
        device: UUID of the GPU.
        control_fd: number of the control socket's descriptor.
    """
    forbid_dumps()
    # These signals may go to the whole process group or unit: kvd decides when its copiers end.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    configure_logging("info", json=None)
    control = socket.socket(fileno=int(control_fd))
    try:
        gpu = CudaGpu(device)
    except ImportError:
        missing = "the package cuda-bindings is not installed"
        CONTROL.send(
            control, Unusable(missing, "also install kvd with: pip install 'cachedattention[cuda]'")
        )
        return
    except DriverError as error:
        CONTROL.send(control, Unusable(str(error), "let kvd access the GPU: see docs/gpu.md"))
        return
    CONTROL.send(control, Ready())
    try:
        Copier(gpu, control).run()
    finally:
        # Do not wait for threads: running copies end with the process, and engines expect that.
        os._exit(0)


main(*sys.argv[1:])
