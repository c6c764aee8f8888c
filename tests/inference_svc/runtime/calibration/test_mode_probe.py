"""Probes of a model in one mode: a missing ability is a refusal, not an internal error."""

from dataclasses import replace

import pytest

from inference_svc.core.errors import InvalidTurnError
from inference_svc.runtime.calibration.mode_probe import (
    PROBE_LENGTHS,
    REPEATED_TOKENS,
    probe_mode,
    probe_tokens,
    refused_if_it_fails,
)
from inference_svc.runtime.calibration.rope_tables import freeze_rotary
from inference_svc.runtime.model import capture
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.model.refusals import ModelModeMissingError
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model


@pytest.fixture
def loaded_as():
    """Return a loader of an architecture's tiny model, ready to be probed."""

    def load(name):
        model = build_model(architectures()[name])
        loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        freeze_rotary(loaded)
        capture.install(model)
        return loaded

    return load


@pytest.mark.parametrize("mode", ["ragged", "gather", "masked", "single"])
def test_a_plain_decoder_supports_every_mode(loaded_as, mode):
    """Each layer caches once, as many tokens as it was given."""
    loaded = loaded_as("llama")
    probe = probe_mode(loaded, mode, "eager")
    assert list(probe.layers) == list(range(loaded.model.config.num_hidden_layers))
    num_tokens = len(probe_tokens(loaded))
    assert {seen.key.shape[2] for seen in probe.layers.values()} == {num_tokens}


def test_a_probe_is_repeatable_and_of_unique_length(loaded_as):
    """A dimension of equal size could be taken for that of the tokens."""
    loaded = loaded_as("llama")
    tokens = probe_tokens(loaded)
    assert tokens[-REPEATED_TOKENS:] == tokens[:REPEATED_TOKENS]
    assert len(tokens) == PROBE_LENGTHS[0]
    loaded.model.config.num_something = PROBE_LENGTHS[0]
    assert len(probe_tokens(loaded)) == PROBE_LENGTHS[1]
    assert max(probe_tokens(replace(loaded, vocab_size=5))) < 5


def test_a_mask_that_hides_more_is_not_replaced(loaded_as):
    """A config that limits attention is refused; one without a limit is not."""
    loaded = loaded_as("llama")
    loaded.model.config.sliding_window = 8
    with pytest.raises(ModelModeMissingError, match="sliding_window"):
        probe_mode(loaded, "masked", "eager")
    loaded.model.config.sliding_window = None
    probe_mode(loaded, "masked", "eager")


def test_a_models_exception_is_a_refusal_with_its_cause():
    """With its first line; an internal error stays one."""

    class Loaded:
        architecture = "FooForCausalLM"

    said = "FooForCausalLM does not run at all"
    with pytest.raises(ModelModeMissingError, match=said) as caught:  # noqa: SIM117
        with refused_if_it_fails(Loaded(), "at all"):
            raise ValueError("first\nsecond")
    assert "ValueError: first" in caught.value.message
    assert "second" not in caught.value.message
    ours = InvalidTurnError("ours", "remedy")
    with pytest.raises(InvalidTurnError) as kept, refused_if_it_fails(Loaded(), "at all"):
        raise ours
    assert kept.value is ours
