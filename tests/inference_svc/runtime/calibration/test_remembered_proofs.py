"""A proof is remembered between starts, for the same model, code and device only."""

import hashlib
import json
import platform
from dataclasses import replace

import pytest
import torch

from inference_svc.core.truncation import USUAL_SINKS
from inference_svc.runtime.calibration import remembered_proofs
from inference_svc.runtime.calibration.remembered_proofs import Proof, calibrate_once, proof_name
from inference_svc.runtime.cpu import product_kernel
from inference_svc.runtime.cpu.native_library import NativeLibraryError
from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.model import packing
from inference_svc.runtime.model.capture import ATTENTION_NAME
from inference_svc.runtime.model.model_loader import describe_model, load_model
from inference_svc.runtime.model.packed_linear import packed_bytes, packing_of
from inference_svc.runtime.model.packing import OneDnnPacking

# A model of each mode; gpt2 is coupled.
NAMES = ["llama", "deepseek-v3", "deepseek-v32", "falcon", "bloom", "gpt2", "deepseek-v4"]


@pytest.fixture
def pack_all(monkeypatch):
    """Have small layers packed, too, as the tests' models have no others."""
    monkeypatch.setattr(product_kernel, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(packing, "MIN_WEIGHTS_ONEDNN_FLOAT32", 1)


def describe_built(build, name):
    return describe_model(build(name), tokenizer=None, name=name, fingerprint="a" * 32)


@pytest.mark.parametrize("name", NAMES)
def test_a_proof_is_found_again(build, tmp_path, name):
    """In every mode: the second start has the calibration, the sinks and the notes of the first."""
    first = calibrate_once(describe_built(build, name), "auto", tmp_path / "proofs.json")
    again = calibrate_once(describe_built(build, name), "auto", tmp_path / "proofs.json")
    assert (first[2], again[2]) == (False, True)
    assert again[1] == first[1]
    for field in ("mode", "positions", "layout", "attention_calls", "notes", "own_layers"):
        assert getattr(again[0], field) == getattr(first[0], field)


def test_rounding_is_remembered(build, tmp_path):
    """Models in 16 bits have it, in float32 not: later choices tolerate it."""
    roundings = []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float32):
        model = build("llama").to(dtype)
        loaded = describe_model(model, tokenizer=None, name="llama", fingerprint="a" * 32)
        calibration, _, was_proven = calibrate_once(loaded, "auto", tmp_path / "proofs.json")
        roundings.append(calibration.rounding)
    assert roundings[0] == roundings[1] > roundings[2] == 0
    assert not was_proven


def test_the_number_of_sinks_is_remembered(sink_model, tmp_path):
    """It is not measured again."""
    found = [
        calibrate_once(load_model(sink_model), "auto", tmp_path / "proofs.json")[1:]
        for _ in range(2)
    ]
    assert found == [(USUAL_SINKS, False), (USUAL_SINKS, True)]


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "b" * 32},
        {"dtype": torch.bfloat16},
        {"context_window": 77},
    ],
)
def test_another_model_is_proven_anew(build, tmp_path, change):
    """Whatever differs."""
    loaded = describe_built(build, "llama")
    calibrate_once(loaded, "auto", tmp_path / "proofs.json")
    assert proof_name(replace(loaded, **change), "auto") != proof_name(loaded, "auto")
    assert proof_name(loaded, "coupled") != proof_name(loaded, "auto")


def test_other_positions_have_their_own_proof(build, tmp_path):
    """Each stays remembered."""
    file = tmp_path / "proofs.json"
    proven = [
        (calibration.positions, was_proven)
        for positions in ("auto", "coupled", "auto", "coupled")
        for calibration, _, was_proven in [
            calibrate_once(describe_built(build, "llama"), positions, file)
        ]
    ]
    assert proven == [
        ("decoupled", False),
        ("coupled", False),
        ("decoupled", True),
        ("coupled", True),
    ]


def test_a_model_that_was_proven_with_packed_weights_is_packed_again(build, tmp_path, pack_all):
    """In the same way; plain weights are used only where packing is switched off."""
    file, found = tmp_path / "proofs.json", []
    for choice in ("auto", "torch", "off") * 2:
        loaded = describe_built(build, "llama")
        *_, was_proven = calibrate_once(loaded, "auto", file, choice)
        found.append((packing_of(loaded.model), was_proven))
    names = ("cpp", "torch", "")
    assert found == [(name, was_proven) for was_proven in (False, True) for name in names]


def test_a_compiler_that_came_later_is_used(build, tmp_path, pack_all, monkeypatch):
    """The first proof was made with what there was."""
    file = tmp_path / "proofs.json"

    def no_compiler():
        raise NativeLibraryError("there is no C++ compiler (g++)")

    for is_missing in (True, False):
        loaded = describe_built(build, "llama")
        with monkeypatch.context() as patch:
            if is_missing:
                patch.setattr(ProductKernel, "load", no_compiler)
            assert not calibrate_once(loaded, "auto", file, "auto")[2]
        assert packing_of(loaded.model) == ("torch" if is_missing else "cpp")


@pytest.mark.parametrize("version", ["python", "torch", "transformers", "ours"])
def test_other_code_needs_a_new_proof(build, tmp_path, monkeypatch, version):
    """Another release of this project or its libraries, or one changed byte of source."""
    calibrate_once(describe_built(build, "llama"), "auto", tmp_path / "proofs.json")
    if version == "python":
        monkeypatch.setattr(platform, "python_version", lambda: "3.99.0")
    elif version == "ours":
        (tmp_path / "ours").mkdir()
        (tmp_path / "ours" / "attention.py").write_text("# another one\n")
        monkeypatch.setattr(remembered_proofs.inference_svc.runtime, "__path__", [str(tmp_path)])
    else:
        monkeypatch.setattr(getattr(remembered_proofs, version), "__version__", "99.0")
    assert not calibrate_once(describe_built(build, "llama"), "auto", tmp_path / "proofs.json")[2]


@pytest.mark.parametrize("found", ["mode", "found"])
def test_a_wrong_proof_is_not_used(build, tmp_path, found):
    """Its name and checksum are right, but the probe finds another calibration."""
    file = tmp_path / "proofs.json"
    first = calibrate_once(describe_built(build, "llama"), "auto", file)
    _, body = file.read_bytes().split(b"\n", 1)
    entries = json.loads(body)
    (entry,) = entries.values()
    entry[found] = {"mode": "gather", "found": "0" * 64}[found]
    body = json.dumps(entries).encode()
    checksum = hashlib.sha256(remembered_proofs.FORMAT + body).hexdigest().encode()
    file.write_bytes(checksum + b"\n" + body)
    again = calibrate_once(describe_built(build, "llama"), "auto", file)
    assert not again[2]
    assert (again[0].mode, again[0].layout) == (first[0].mode, first[0].layout)
    assert calibrate_once(describe_built(build, "llama"), "auto", file)[2]


@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_model_that_differs_from_its_proof_gets_its_own_weights_back(build, pack_all, name):
    """It is proven anew with them."""
    loaded = describe_built(build, name)
    proof = Proof(
        "ragged",
        ATTENTION_NAME,
        "decoupled",
        (),
        "0" * 64,
        0,
        packing="torch",
        is_one_by_one=False,
        rounding=0.0,
    )
    assert remembered_proofs._calibrate_by(loaded, proof, [OneDnnPacking()]) is None
    assert not packed_bytes(loaded.model)


@pytest.mark.parametrize("damage", ["torn", "rubbish"])
def test_a_damaged_file_is_replaced_after_a_new_proof(build, tmp_path, damage):
    """And is made anew."""
    file = tmp_path / "proofs.json"
    calibrate_once(describe_built(build, "llama"), "auto", file)
    file.write_bytes(file.read_bytes()[:90] if damage == "torn" else b"rubbish\n{}")
    assert not calibrate_once(describe_built(build, "llama"), "auto", file)[2]
    assert calibrate_once(describe_built(build, "llama"), "auto", file)[2]
