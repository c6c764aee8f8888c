"""The fingerprint of a model directory for tests."""

from pathlib import Path

from inference_svc.runtime.model.fingerprint import Fingerprint


def model_fingerprint(path: Path) -> str:
    """Return the fingerprint of a directory; read every file in it."""
    with Fingerprint(path) as fingerprint:
        return fingerprint.result()
