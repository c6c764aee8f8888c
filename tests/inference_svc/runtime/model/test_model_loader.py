"""Model directories: loading, refusals, and identity."""

import json
import shutil
import time

import pytest
import torch
from transformers.utils.logging import enable_progress_bar

from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from inference_svc.runtime.model.model_loader import load_model
from tests.fingerprints import model_fingerprint


@pytest.fixture(scope="session")
def saved(build, tmp_path_factory):
    """Return a directory with a saved model."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    build("llama").save_pretrained(path)
    return path


@pytest.fixture
def copied(saved, tmp_path):
    """Return a copy that a test may spoil."""
    return shutil.copytree(saved, tmp_path / "copy")


def test_a_saved_model_is_loaded(saved):
    """Name, sizes and end tokens come from the directory."""
    loaded = load_model(saved)
    assert (loaded.name, loaded.architecture) == ("tiny-llama", "LlamaForCausalLM")
    assert (loaded.context_window, loaded.vocab_size) == (192, 97)
    assert loaded.eos_ids == {2}
    assert loaded.tokenizer is None
    assert loaded.dtype == torch.float32
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_the_wait_for_the_fingerprint_is_measured(saved):
    """Seconds on a clock, at most those of the whole load."""
    began_s = time.monotonic()
    loaded = load_model(saved)
    assert 0 <= loaded.hash_wait_s <= time.monotonic() - began_s
    assert loaded.hashed_bytes > 0


def test_no_progress_bar_is_drawn(saved, capfd):
    """The output of a service is a log."""
    enable_progress_bar()
    load_model(saved)
    assert "%|" not in capfd.readouterr().err


def test_dtype_is_an_option_of_the_start(saved):
    """The same model in another dtype keeps its fingerprint."""
    half, single = load_model(saved, dtype="bfloat16"), load_model(saved)
    assert half.dtype == torch.bfloat16
    assert half.fingerprint == single.fingerprint


@pytest.mark.parametrize("spoil", ["directory", "config.json", "model.safetensors"])
def test_missing_files_are_named(copied, spoil):
    """A missing directory, config or weight file is one line with a remedy."""
    path = copied / "elsewhere" if spoil == "directory" else copied
    (copied / spoil).unlink(missing_ok=True)
    with pytest.raises(UnknownModelError) as refused:
        load_model(path)
    assert str(path) in refused.value.message
    assert "save_pretrained" in refused.value.remedy


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_unreadable_files_are_refused_in_one_line(copied, file):
    """Without a traceback."""
    (copied / file).write_bytes(b"{ rubbish")
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(copied)
    assert "\n" not in str(refused.value)


def test_a_broken_tokenizer_is_refused(copied):
    """It is not treated as missing."""
    (copied / "tokenizer.json").write_text("{ rubbish")
    with pytest.raises(UnsupportedModelError, match="tokenizer"):
        load_model(copied)


def test_unknown_architecture_is_refused(copied):
    """A model type that Transformers does not know is named."""
    (copied / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(UnsupportedModelError, match="no-such-model"):
        load_model(copied)


def test_a_model_of_two_parts_is_refused_with_its_own_remedy(copied):
    """Not with that of unreadable files."""
    path = copied / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "is_encoder_decoder": True}))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder") as refused:
        load_model(copied)
    assert refused.value.remedy == "serve a decoder-only model"


@pytest.mark.parametrize("device", ["cuda:99", "no-such-device"])
def test_unusable_device_is_refused(saved, device):
    """A missing device is one line."""
    with pytest.raises(UnsupportedModelError, match=device):
        load_model(saved, device=device)


def test_fingerprint_follows_content(saved, copied):
    """Equal content elsewhere is the same model; one changed weight or setting is another."""
    assert model_fingerprint(copied) == model_fingerprint(saved)
    weights = copied / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint(copied) != model_fingerprint(saved)
    shutil.copy(saved / "model.safetensors", weights)
    config = json.loads((copied / "config.json").read_text())
    config["transformers_version"] = "0.0"
    (copied / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(copied) == model_fingerprint(saved)
    config["rms_norm_eps"] = 0.5
    (copied / "config.json").write_text(json.dumps(config))
    assert model_fingerprint(copied) != model_fingerprint(saved)
