"""The fingerprint of a model directory, as a test asks for it."""

from pathlib import Path

from inference_svc.runtime.model.fingerprint import Fingerprint


def model_fingerprint(path: Path) -> str:
    """Return the fingerprint of a directory; reads all of it."""
    with Fingerprint(path) as fingerprint:
        return fingerprint.result()
