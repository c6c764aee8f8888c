import shutil

import pytest

from inference_svc.eval.eval_model import prepare_model
from inference_svc.runtime.model.model_loader import load_model
from tests.models import build_absolute_model

WINDOW = 64


@pytest.fixture(scope="session")
def eval_model(tiny_model):
    """The tiny model, ready for every method, in a window that a short text overflows often."""
    return prepare_model(load_model(tiny_model), WINDOW)


@pytest.fixture(scope="session")
def absolute_model(tiny_model, tmp_path_factory):
    """A model of learned positions, with a tokenizer (whose ids it has too few of)."""
    directory = build_absolute_model(tmp_path_factory.mktemp("model") / "absolute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, directory)
    return directory
