"""Attention over pages on the device: the results of plain attention, and the models' answers."""

import os

import pytest
import torch

from inference_svc.runtime.attention.paged_attention import PageCall, PagedAttention
from inference_svc.runtime.calibration.attention_choice import choose_attention
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.kv.layer_groups import LayerGroups
from inference_svc.runtime.model.model_loader import describe_model
from tests.pages import PARTS, Pages
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model

# the interpreter is a thousand times slower
IS_INTERPRETED = os.environ.get("GPU_TESTS_DEVICE", "cpu") == "cpu"
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [(4, 2, 8, 8), (8, 2, 64, 64), (8, 8, 128, 128), (6, 2, 48, 32), (16, 4, 256, 256)]
# Shapes of one call; tests/inference_svc/runtime/cuda has the interpreter run the others.
OPTIONS = [{"window": 300, "sinks": 1.5}, {}, {"softcap": 5.0, "window": 100}, {"chunk": 33}]
MODELS = ["gpt_oss", "llama", "gemma2", "gemma3_text", "cohere2"]
# tests/inference_svc/runtime/calibration/test_attention_choice.py interprets one of these.
INTERPRETED_MODELS = [pytest.param(MODELS[0], marks=pytest.mark.long)]


@pytest.mark.parametrize("shape", SHAPES[:1] if IS_INTERPRETED else SHAPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS[:1] if IS_INTERPRETED else OPTIONS, ids=str)
def test_each_part_sees_its_own_tokens(device, dtypes, shape, options):
    """In every dtype; the bits do not depend on the parts beside a part."""
    if "sinks" in options:
        options = options | {"sinks": torch.linspace(-2, options["sinks"], shape[0])}
    call = PageCall(shape[2] ** -0.5, **options)
    for dtype in dtypes:
        pages = Pages(PARTS, shape, 16, dtype, device)
        sizes = [size for size, _ in PARTS]
        for part, piece in enumerate(pages.attended(call).split(sizes)):
            assert (piece - pages.expected(part, call)).abs().max() < CLOSE[dtype], (dtype, part)
            assert torch.equal(pages.attended(call, [part]), piece), (dtype, part)


@pytest.mark.parametrize("name", INTERPRETED_MODELS if IS_INTERPRETED else MODELS)
def test_calibration_accepts_models_with_the_kernel(device, dtypes, name):
    """The check is the one that the service makes at start."""
    for dtype in dtypes[:1] + dtypes[2:]:
        model = build_model(architectures()[name]).to(device, dtype)
        loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        calibration = calibrate(loaded)
        groups = LayerGroups.plain([layer.shape for layer in calibration.layers], 16)
        chosen = choose_attention("triton", loaded, calibration, groups)
        assert isinstance(chosen, PagedAttention)
