"""Fixtures of the session store's tests."""

import pytest

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.model.model_loader import load_model
from inference_svc.runtime.worker_thread import WorkerThread


@pytest.fixture(scope="module")
def model(tiny_model):
    loaded = load_model(tiny_model, "float32", "cpu")
    return loaded, calibrate(loaded)


@pytest.fixture
def copy_threads():
    threads = WorkerThread("load"), WorkerThread("read"), WorkerThread("store")
    yield threads
    for thread in threads:
        thread.close()
