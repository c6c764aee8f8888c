"""The served model, in the official clients' form."""

import pytest
from anthropic.types import ModelInfo
from openai.types import Model

from inference_svc.http_api.anthropic.dialect import ANTHROPIC
from inference_svc.http_api.dialect import ServedModel
from inference_svc.http_api.errors import UnknownModelNameError
from inference_svc.http_api.openai.dialect import OPENAI
from tests.inference_svc.http_api.as_clients_read import strict

MODEL = ServedModel("tiny", ("gpt-4o",), "f" * 64, 1_700_000_000, 2048)


def test_models_are_listed():
    """The model and each alias, by every name; no other."""
    listed = [strict(Model, one) for one in OPENAI.models(MODEL)["data"]]
    assert [model.id for model in listed] == ["tiny", "gpt-4o"]
    assert strict(Model, OPENAI.model(MODEL, "gpt-4o")).id == "gpt-4o"
    with pytest.raises(UnknownModelNameError, match="send 'tiny' as the model"):
        MODEL.check("gpt-5")


def test_models_in_anthropics_form():
    """The same, on one page; an alias is shown as its model."""
    page = ANTHROPIC.models(MODEL)
    listed = [strict(ModelInfo, one) for one in page["data"]]
    assert [model.id for model in listed] == [page["first_id"], page["last_id"]]
    assert not page["has_more"]
    shown = strict(ModelInfo, ANTHROPIC.model(MODEL, "gpt-4o"))
    assert (shown.id, shown.display_name, shown.max_input_tokens) == ("gpt-4o", "tiny", 2048)
    assert shown.created_at.timestamp() == 1_700_000_000
