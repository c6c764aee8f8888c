"""Random models of the zoo's configs, in which every parameter matters."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.zoo.architectures import Architecture
from tests.zoo.overrides import OVERRIDES, WEIGHT_SCALES
from tests.zoo.tiny_configs import tiny_config

SEED = 7
MAX_PARAMETERS = 12_000_000  # a model with more is not tiny: shrinking missed a field of its config
# larger than the usual initial weights, with which models hardly see their context
WEIGHT_SCALE = 4.0
# norms and biases start as ones and zeros, which would hide whether they are used
VECTOR_NOISE = 0.2


class NotTinyError(Exception):
    """A config that was not shrunk enough."""


def build_model(architecture: Architecture) -> Any:
    """Build the model, the same in every process.

    Raises:
        NotTinyError: see MAX_PARAMETERS.
        whatever Transformers raises for a config that it cannot build.
    """
    config = _config(architecture)
    with torch.device("meta"):
        num_parameters = sum(
            parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters()
        )
    if num_parameters > MAX_PARAMETERS:
        raise NotTinyError(f"{architecture.name} has {num_parameters:,} parameters")
    torch.manual_seed(SEED)
    config = _config(architecture)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(SEED)
    scale = WEIGHT_SCALES.get(architecture.model_type, WEIGHT_SCALE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
            elif parameter.is_floating_point():
                parameter.add_(VECTOR_NOISE * torch.randn(parameter.shape, generator=generator))
    return model.float().eval()


def _config(architecture: Architecture) -> Any:
    of_type = OVERRIDES.get(architecture.model_type, {})
    changed = {architecture.model_type: {**of_type, **architecture.changed}}
    return tiny_config(architecture.model_type, {**OVERRIDES, **changed})
