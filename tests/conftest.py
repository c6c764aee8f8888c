"""Fixtures that several test folders share."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
import structlog
from hypothesis import HealthCheck, settings

from tests.tls_files import Authority

LONG_S = 3600
if os.environ.get("GPU_TESTS_DEVICE", "cpu") == "cpu":
    # Triton's kernels are interpreted. Set before anything imports it, and for child processes too.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Services keep the kernel for CPUs in their state directory, where each would compile it anew.
_KERNELS = Path.home() / ".cache" / "cachedattention"
os.environ.setdefault("CACHEDATTENTION_KERNEL_DIR", str(_KERNELS))

# Machines are slow now and then: nothing is timed. `make test` draws the same examples every time,
# by default a fifth of the usual hundred; `make test-long` draws new ones.
DRAWN = 20
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("seeded", _UNTIMED, derandomize=True, max_examples=DRAWN)
settings.register_profile("random", _UNTIMED, derandomize=False)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Choose the Hypothesis profile before any test module is imported, and a short base directory.

    Socket paths have at most 107 bytes, of which pytest's own directories would take forty.
    """
    # A shell that runs the tests in the background makes them, and their children, ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Logs of engines in this process must not mix with the output of a command run in this process.
    # Plain tracebacks, as the service's own are: one with values of variables takes half a second.
    structlog.configure(
        processors=[
            *structlog.get_config()["processors"][:-1],
            structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
        ],
        logger_factory=lambda *_: structlog.PrintLogger(sys.__stderr__),
    )
    settings.load_profile("seeded" if "not long" in config.option.markexpr else "random")
    if config.option.basetemp is None and not hasattr(config, "workerinput"):
        config.option.basetemp = tempfile.mkdtemp(prefix="ca-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    if not hasattr(config, "workerinput"):
        trust_one_authority(config)


def trust_one_authority(config):
    """Have HTTP clients trust one test authority only.

    Each client reads every certificate that it trusts, and reading the system's takes longer than
    the requests of a test. No test server uses a public certificate. Workers inherit the setting.
    """
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    os.environ["SSL_CERT_FILE"] = str(Authority(directory).path)


def pytest_collection_modifyitems(items):
    """Give long tests a time limit of an hour unless they set their own.

    Hypothesis reports a test as flaky if it is stopped in the middle of an example.
    """
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave imported modules and collected tests out of garbage collection.

    They live to the end: scanning them repeatedly took up to a fifth of the processor time of tests
    that do much in this process. Other objects are scanned less often than usual as well, which
    saves a tenth: the test processes live for seconds.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(10_000, 20, 50)
        gc.enable()


@pytest.fixture(autouse=True)
def log_as_before():
    """Restore the log settings after a test: a command that runs in this process changes them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def forked_children():
    """Fork the children of benches that run in this process from one with its imports done."""
    from tests.warm_children import warm_children

    with warm_children():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Return the directory of the tiny model, built once."""
    import torch  # the tests of kvd do not need torch

    from tests.models import build_model

    torch.set_num_threads(1)
    return build_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sink_model(tmp_path_factory):
    """Return the directory of a tiny model with an attention sink (its first token), built once."""
    from tests.models import build_sink_model

    return build_sink_model(tmp_path_factory.mktemp("model") / "sink")


@pytest.fixture
def short_dir():
    """Return a directory whose path leaves room for socket names (107 bytes)."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def oracle(tiny_model):
    """Return the judge of token identity for the tiny model."""
    from tests.oracle import Oracle

    return Oracle(tiny_model)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tiny_model, tmp_path_factory):
    """Run the service of all identity tests; each test gives it its own kvd."""
    from tests.pair import Pair

    pair = Pair(tiny_model, tmp_path_factory.mktemp("pair"))
    async with pair.service:
        yield pair
