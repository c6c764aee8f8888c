"""Fixtures of more than one test folder."""

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
    # Triton's kernels are interpreted. Said before anything imports it, and to the children too.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Services keep the kernel for CPUs in their state directory, where each would compile it anew.
_KERNELS = Path.home() / ".cache" / "cachedattention"
os.environ.setdefault("CACHEDATTENTION_KERNEL_DIR", str(_KERNELS))

# Machines are slow now and then: nothing is timed. What `make test` draws is the same every time
# and, where a test says no number, a fifth of the usual hundred; `make test-long` draws anew.
DRAWN = 20
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("seeded", _UNTIMED, derandomize=True, max_examples=DRAWN)
settings.register_profile("random", _UNTIMED, derandomize=False)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Choose the profile before any test module is imported, and a short place for files.

    Sockets' names have 107 bytes at most, of which pytest's own directories would take forty.
    """
    # Who runs the tests in the background has Ctrl-C ignored, by what we start, too.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Nor may what our own engines log get into what a command says that runs in this process.
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
    """Have HTTP clients trust an authority of nobody's.

    Each client reads all that it trusts, which takes longer than what tests ask of it if it trusts
    the world; no server of ours has a certificate of that. Workers inherit it.
    """
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))
    os.environ["SSL_CERT_FILE"] = str(Authority(directory).path)


def pytest_collection_modifyitems(items):
    """A long test has an hour, if it does not say otherwise.

    Hypothesis reports a test as flaky if it is stopped in the middle of an example.
    """
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_S))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave what is imported and collected out of garbage collection.

    It stays to the end: looking at it again and again took up to a fifth of the processor time of
    tests that do much in this process. What tests make is looked at less often than usual, too,
    which takes a tenth of that time away: they live for seconds.
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
    """A command that a test runs in this process sets up logging: the next test has its own."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def forked_children():
    """What a bench starts in this process is forked with its imports done."""
    from tests.warm_children import warm_children

    with warm_children():
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The directory of the tiny model, built once."""
    import torch  # the tests of kvd do without it

    from tests.models import build_model

    torch.set_num_threads(1)
    return build_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def sink_model(tmp_path_factory):
    """The directory of a tiny model that leans on the first token of a context, built once."""
    from tests.models import build_sink_model

    return build_sink_model(tmp_path_factory.mktemp("model") / "sink")


@pytest.fixture
def short_dir():
    """A directory whose path leaves room for socket names (107 bytes)."""
    directory = Path(tempfile.mkdtemp(prefix="ca-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def oracle(tiny_model):
    """The judge of token identity for the tiny model."""
    from tests.oracle import Oracle

    return Oracle(tiny_model)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(tiny_model, tmp_path_factory):
    """The service of all identity tests; each test gives it a kvd of its own."""
    from tests.pair import Pair

    pair = Pair(tiny_model, tmp_path_factory.mktemp("pair"))
    async with pair.service:
        yield pair
