"""Fixtures of tests that serve."""

import ssl

import pytest

from shared.access.credentials import ssl_context
from shared.process.log import configure_logging
from tests.tls_files import Authority


@pytest.fixture(params=["plain", "tls"])
def tls(request, tmp_path):
    """Return the server's settings and the client's context; None for a plain server."""
    if request.param == "plain":
        return None, None
    authority = Authority(tmp_path)
    settings = authority.server(wants_certificates=False)
    return ssl_context(settings), ssl.create_default_context(cafile=authority.path)


@pytest.fixture
def logging_restored():
    """Restore the process's logging after a test has configured it."""
    yield
    configure_logging("info", json=False)
