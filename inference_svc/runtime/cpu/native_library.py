"""Native library: compiles this package's C++ kernels for this machine's processor, and loads them.

The result is kept for later starts, in the directory that KERNEL_DIR names, under a name made of
everything that it depends on: sources, options, compiler, torch and processor. So a directory may
be shared by different machines, and an update of the package or of torch compiles anew.

The library uses the OpenMP that torch has loaded: a second one would have threads of its own, which
wait for work by spinning, and so take the processors from torch's.
"""

import ctypes
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

KERNEL_DIR = "CACHEDATTENTION_KERNEL_DIR"  # the environment's variable
KERNELS = (
    "decode_attention.cpp",
    "prefill_attention.cpp",
    "packed_product.cpp",
    "token_load.cpp",
    "operators.cpp",
)
HEADERS = ("attention.h", "kernels.h", "lanes.h", "panels.h")
TORCH = Path(torch.__file__).parent  # its headers and libraries
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC")
COMPILER_TIMEOUT_S = 120


class NativeLibraryError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why."""


def load_library(environ: Mapping[str, str] = os.environ) -> ctypes.CDLL:
    """Load the library, and compile it first if that has not been done before.

    Args:
        environ: the environment; CXX may name another g++, with options.

    Raises:
        NativeLibraryError: there is no compiler, it fails, or the directory cannot be written to.
    """
    compiler = shlex.split(environ.get("CXX", "")) or _compiler()
    command = [*compiler, *OPTIONS, f"-I{TORCH / 'include'}"]
    openmp = _loaded_openmp()
    directory = _directory(environ)
    try:
        path = directory / f"kernels-{_name(command, openmp)}.so"
        with suppress(OSError):  # not there, or cut off by a crash
            return ctypes.CDLL(str(path))
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            made = Path(scratch) / path.name
            objects = _compile(command, Path(scratch))
            torch_library = [f"-L{TORCH / 'lib'}", "-ltorch_cpu"]  # loaded, so found without a path
            _run([*command, "-shared", *objects, *openmp, *torch_library, "-o", str(made)])
            with made.open("rb") as library:
                os.fsync(library.fileno())  # a name on disk stands for whole contents
            made.replace(path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(str(error)) from error


def _source(name: str) -> Path:
    return Path(__file__).with_name(name)


def _directory(environ: Mapping[str, str]) -> Path:
    if environ.get(KERNEL_DIR):
        return Path(environ[KERNEL_DIR])
    try:
        return Path.home() / ".cache" / "cachedattention"
    except RuntimeError as error:
        raise NativeLibraryError(f"the user has no home directory; set {KERNEL_DIR}") from error


def _compiler() -> list[str]:
    found = shutil.which("g++")
    if found is None:
        raise NativeLibraryError("there is no C++ compiler (g++)")
    return [found]


def _compile(command: list[str], scratch: Path) -> list[str]:
    """Compile all sources at the same time, for the first start waits; return their objects."""

    def compiled(name: str) -> str:
        made = scratch / f"{name}.o"
        _run([*command, "-c", str(_source(name)), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(len(KERNELS)) as pool:
        return list(pool.map(compiled, KERNELS))


def _run(command: list[str]) -> None:
    """Run the compiler, and say in one line why it fails."""
    try:
        subprocess.run(
            command, capture_output=True, check=True, text=True, timeout=COMPILER_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line]
        reason = lines[0] if lines else f"exit status {error.returncode}"
        raise NativeLibraryError(f"{command[0]}: {reason[:200]}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeLibraryError(f"{command[0]} takes over {COMPILER_TIMEOUT_S} s") from error


def _loaded_openmp() -> list[str]:
    """Return the path of the GNU OpenMP library that this process has loaded, if it has."""
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[-1]
            if Path(path).name.startswith("libgomp"):
                return [path]
    return []


def _name(command: list[str], openmp: list[str]) -> str:
    """Return a hash of everything that the compiled code depends on."""
    sources = [_source(name).read_text() for name in (*KERNELS, *HEADERS)]
    parts = [*sources, *command, *openmp, *processor_features(), torch.__version__]
    with suppress(OSError):
        compiler = Path(shutil.which(command[0]) or command[0]).resolve().stat()
        parts.append(f"{compiler.st_size} {compiler.st_mtime_ns}")
    return sha256("\0".join(parts).encode()).hexdigest()[:16]


def processor_features() -> list[str]:
    """Return the lines of the system that tell for which processor code is compiled."""
    processor = Path("/proc/cpuinfo").read_text().split("\n\n", maxsplit=1)[0].splitlines()
    return [line for line in processor if line.startswith(("model name", "flags", "Features"))]
