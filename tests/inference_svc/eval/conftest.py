import shutil

import pytest

from inference_svc.eval.eval_model import prepare_model
from inference_svc.runtime.model.model_loader import load_model
from tests.models import build_absolute_model

WINDOW = 64


@pytest.fixture(scope="session")
def eval_model(tiny_model):
    """Load the tiny model with a small window, ready for every method."""
    return prepare_model(load_model(tiny_model), WINDOW)


@pytest.fixture(scope="session")
def absolute_model(tiny_model, tmp_path_factory):
    """Load a model of learned positions, with a tokenizer (which has more ids than the model)."""
    directory = build_absolute_model(tmp_path_factory.mktemp("model") / "absolute")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, directory)
    return directory
