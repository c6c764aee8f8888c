"""Keys that the device embeds on their way to pages have torch's bits; calibration accepts them."""

import os

import pytest
import torch

from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.rotation_choice import choose_rotation
from inference_svc.runtime.cuda.key_rotation import embed_on_device
from inference_svc.runtime.model.model_loader import describe_model
from inference_svc.runtime.positions.rotary import RotaryTable, find_pairing
from tests.ropes import DIM, halves, interleaved, partial, scaled
from tests.zoo.architectures import architectures
from tests.zoo.models import build_model

IS_INTERPRETED = os.environ.get("GPU_TESTS_DEVICE", "cpu") == "cpu"
MODELS = ["llama", "gpt_oss", "glm4", "gpt_neox", "deepseek_v3"]


@pytest.mark.parametrize("rope", [halves, interleaved, partial, scaled])
def test_bits_equal_those_of_torch(device, dtypes, rope):
    """In every dtype, with tables of that dtype and of float32."""
    for dtype in dtypes:
        for table_dtype in {dtype, torch.float32}:
            pairing = find_pairing(rope, DIM, torch.device("cpu"))
            rotary = RotaryTable(
                lambda keys, positions: rope(keys.cpu(), positions.cpu()).to(device),
                pairing,
                max_tokens=4096,
                table_dtype=table_dtype,
                dtype=table_dtype,
                device=device,
            )
            keys = torch.randn(333, 8, DIM).to(device, dtype)
            region = torch.full((700, 8, DIM), 9.0, device=device, dtype=dtype)
            slots = torch.randperm(700, device=device)[:333]
            embed_on_device(keys, rotary.tables(3000, 333), region, slots)
            expected = torch.full_like(region, 9.0)
            expected[slots] = rotary.rotate(keys, 3000)
            assert torch.equal(region, expected), (dtype, table_dtype)


@pytest.mark.parametrize("name", MODELS[:1] if IS_INTERPRETED else MODELS)
def test_calibration_accepts_models_with_the_kernel(device, dtypes, name):
    """The check is the one that the service makes at start."""
    for dtype in dtypes:
        model = build_model(architectures()[name]).to(device, dtype)
        loaded = describe_model(model, tokenizer=None, name=name, fingerprint="0" * 32)
        assert choose_rotation("triton", loaded, calibrate(loaded)).embed is embed_on_device
