"""The service's installation: default socket and directories, shipped model, the extra `engine`.

Both the service and its clients take their defaults from here. Only a host that runs a model needs
PyTorch and Transformers, the extra `engine`; this module does not import them.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path

from shared.types.errors import ConfigError

SYSTEM_NAME = "inference-svc"  # of RuntimeDirectory= and StateDirectory=
SOCKET = "inference.sock"
SHIPPED_MODEL = Path(__file__).parent / "demo" / "model"  # a small chat model; see its README.md


def default_listen(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address of the service's Unix socket.

    It is in the supervisor's runtime directory, else in the system's for root, or in the user's.
    """
    if environ.get("RUNTIME_DIRECTORY"):
        return f"unix:{environ['RUNTIME_DIRECTORY'].split(':')[0]}/{SOCKET}"
    if os.geteuid() == 0:
        return f"unix:/run/{SYSTEM_NAME}/{SOCKET}"
    if environ.get("XDG_RUNTIME_DIR"):
        return f"unix:{environ['XDG_RUNTIME_DIR']}/{SYSTEM_NAME}/{SOCKET}"
    return f"unix:/tmp/{SYSTEM_NAME}-{os.geteuid()}/{SOCKET}"  # its directory is made 0700


def default_state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the state directory: the supervisor's, else the system's for root, or the user's."""
    if environ.get("STATE_DIRECTORY"):
        return Path(environ["STATE_DIRECTORY"].split(":")[0])
    if os.geteuid() == 0:
        return Path("/var/lib") / SYSTEM_NAME
    if environ.get("XDG_STATE_HOME"):
        return Path(environ["XDG_STATE_HOME"]) / SYSTEM_NAME
    return Path.home() / ".local" / "state" / SYSTEM_NAME


KERNEL_CACHES = {
    "CACHEDATTENTION_KERNEL_DIR": "native",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def keep_kernels_in(state_dir: Path, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let kernel compilers cache kernels in the state directory, unless a variable says where.

    By default they use the home directory, which a service does not have. Call this before they
    are imported.
    """
    for variable, name in KERNEL_CACHES.items():
        environ.setdefault(variable, str(state_dir / "kernels" / name))


EXTRA = "cachedattention[engine]"
MODULES = ("torch", "transformers", "safetensors", "jinja2")  # modules of the extra's packages


PYTHONS = ((3, 11), (3, 12))  # versions on which tests run models; kvd and clients run on more


class UntestedPythonError(ConfigError):
    """Models are not tested on this version of Python."""

    reason = "untested_python"


class EngineMissingError(ConfigError):
    """The package was installed without its extra `engine`."""

    reason = "engine_missing"


def require_engine(python: tuple[int, int] = sys.version_info[:2]) -> None:
    """Check that this installation can run a model, without importing anything.

    Args:
        python: major and minor version of the interpreter.

    Raises:
        UntestedPythonError: models are not tested on this version.
        EngineMissingError: packages of the extra are missing.
    """
    if python not in PYTHONS:
        known = " or ".join(f"{major}.{minor}" for major, minor in PYTHONS)
        raise UntestedPythonError(
            "models can be run on Python {}, but this is Python {}.{}".format(known, *python),
            f"create the virtual environment with Python {known}",
        )
    missing = [module for module in MODULES if find_spec(module) is None]
    if missing:
        raise EngineMissingError(
            f"{', '.join(missing)} is not installed, but this command needs it",
            f"run: pip install '{EXTRA}'",
        )
