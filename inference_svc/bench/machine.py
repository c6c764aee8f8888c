"""What was measured, and on what."""

import os
import platform
from importlib.metadata import version

import psutil
import torch

from inference_svc.assembly import Model
from inference_svc.bench.figures import Machine, Subject
from inference_svc.bench.options import ModelChoice
from shared.process.machine import cpu_name, private_huge_pages
from shared.version import __version__

_LIBRARIES = ("torch", "transformers", "grpcio", "numpy")


def machine_facts(device: torch.device) -> Machine:
    """Look at the machine."""
    accelerator = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Machine(
        cpu=cpu_name(),
        cpus=len(os.sched_getaffinity(0)),
        load_average=os.getloadavg()[0],
        memory_bytes=psutil.virtual_memory().total,
        huge_pages=private_huge_pages(),
        kernel=platform.release(),
        accelerator=accelerator,
        python=platform.python_version(),
        inference_svc=__version__,
        libraries={name: version(name) for name in _LIBRARIES},
    )


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
