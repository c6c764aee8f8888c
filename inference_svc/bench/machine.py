"""What was measured, and on what."""

import torch

from inference_svc.assembly import Model
from inference_svc.bench.figures import Machine, Subject
from inference_svc.bench.options import ModelChoice
from shared.measuring.machine import common_facts
from shared.version import __version__

_LIBRARIES = ("torch", "transformers", "grpcio", "numpy")


def machine_facts(device: torch.device) -> Machine:
    """Look at the machine."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Machine(**common_facts(_LIBRARIES), accelerator=accelerator, inference_svc=__version__)


def subject_of(model: Model, choice: ModelChoice) -> Subject:
    """Describe the model."""
    loaded, layout = model.loaded, model.calibration.layout
    return Subject(
        name=loaded.name,
        architecture=loaded.architecture,
        random=choice.path is None,
        layers=len(layout.layers),
        num_weights=sum(weights.numel() for weights in loaded.model.parameters()),
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        threads=torch.get_num_threads(),
        attention_mode=model.calibration.mode,
        kv_bytes_per_token=layout.token_bytes,
        block_tokens=layout.block_tokens,
    )
