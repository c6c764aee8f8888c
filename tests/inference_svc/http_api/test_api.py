"""The served model, as the official client reads it."""

import pytest
from openai.types import Model

from inference_svc.http_api.api import ServedModel
from inference_svc.http_api.errors import UnknownModelNameError
from tests.inference_svc.http_api.as_clients_read import strict

MODEL = ServedModel("tiny", ("gpt-4o",), "f" * 64, 1_700_000_000, 2048)


def test_models():
    """The model and each alias, by every name; no other."""
    listed = [strict(Model, one) for one in MODEL.as_list()["data"]]
    assert [model.id for model in listed] == ["tiny", "gpt-4o"]
    assert strict(Model, MODEL.shown("gpt-4o")).id == "gpt-4o"
    with pytest.raises(UnknownModelNameError, match="use 'tiny'"):
        MODEL.check("gpt-5")
