"""Models in one file: which are accepted, and the errors of others."""

import json

import gguf
import pytest
import torch

from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from inference_svc.runtime.model.model_directory import (
    INDEX_FILE,
    check_gguf,
    check_model,
    is_gguf,
    shards,
)
from inference_svc.runtime.model.model_loader import load_model
from tests.fingerprints import model_fingerprint
from tests.kvd_as_user import without_root
from tests.models import build_model


@pytest.fixture
def rubbish(tmp_path):
    """Write a file that begins like a GGUF model."""
    path = tmp_path / "rubbish.gguf"
    path.write_bytes(b"GGUF" + bytes(range(64)))
    return path


def test_the_first_bytes_determine_the_format(tmp_path, rubbish):
    """Not the name; a file of another kind is none, and neither is a directory."""
    other = tmp_path / "model.gguf"
    other.write_bytes(b"PK\x03\x04")
    renamed = rubbish.rename(tmp_path / "blob")
    assert [is_gguf(path) for path in (renamed, other, tmp_path)] == [True, False, False]
    with pytest.raises(UnknownModelError, match="neither a model directory nor a GGUF file"):
        load_model(other)


def test_an_index_lists_the_tensors_of_files(tmp_path):
    """A missing or invalid one counts as none."""
    index = tmp_path / INDEX_FILE
    assert shards(tmp_path) == {}
    for weight_map in (["a.safetensors"], None, "a"):
        index.write_text(json.dumps({"weight_map": weight_map}))
        assert shards(tmp_path) == {}
    index.write_text(json.dumps({"weight_map": {"z": "1", "y": "2", "x": "1"}}))
    assert shards(tmp_path) == {"1": ["x", "z"], "2": ["y"]}


def test_a_missing_package_is_named_with_its_command(rubbish):
    """Transformers cannot read the format alone."""
    with pytest.raises(UnsupportedModelError) as refused:
        check_gguf(rubbish, ("no_such_package", "json", "nor_this_one"))
    assert "is a GGUF model" in refused.value.message
    assert refused.value.remedy.startswith("run pip install no_such_package nor_this_one, or")
    assert "docs/getting-a-model.md" in refused.value.remedy
    check_gguf(rubbish, ("json",))


def test_a_part_of_a_model_is_refused(rubbish):
    """It would be taken for a whole one."""
    part = rubbish.rename(rubbish.with_name("big-00002-of-00003.gguf"))
    with pytest.raises(UnsupportedModelError, match="llama-gguf-split --merge"):
        load_model(part)


def test_a_directory_with_such_a_file_names_it(rubbish):
    """It has no config.json, and the error says what to pass instead."""
    with pytest.raises(UnknownModelError, match=f"give the GGUF file itself: {rubbish}"):
        load_model(rubbish.parent)


@pytest.mark.parametrize("closed", [".", "config.json", "model.safetensors", "../file.gguf"])
def test_missing_permissions_are_named(tmp_path, closed):
    """With the path, the user, and the remedy; afterwards it works."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    path = (directory / closed).resolve()
    model = path if path.suffix == ".gguf" else directory
    mode = path.stat().st_mode
    for closed_mode in (0, 0o111):
        path.chmod(closed_mode)
        with without_root(tmp_path), pytest.raises(UnknownModelError) as refused:
            check_model(model)
        path.chmod(mode)
        assert refused.value.message.startswith("user ")
        assert f" may not read {path}" in refused.value.message
        assert refused.value.remedy.startswith(f"run: sudo chmod -R a+rX {model}; ")
    with without_root(tmp_path):
        check_model(model)


def test_an_invalid_file_is_refused_in_one_line(rubbish):
    """Whichever reader fails."""
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(rubbish)
    assert "\n" not in str(refused.value)
    assert str(rubbish) in str(refused.value)


def test_a_files_fingerprint_depends_on_its_content(rubbish):
    """Not on its name; every byte counts."""
    before = model_fingerprint(rubbish)
    assert model_fingerprint(rubbish.rename(rubbish.with_name("other.gguf"))) == before
    content = bytearray(rubbish.with_name("other.gguf").read_bytes())
    content[-1] ^= 1
    rubbish.write_bytes(content)
    assert model_fingerprint(rubbish) != before


def test_a_model_in_a_file_equals_its_directory(tmp_path, capsys):
    """In logits and tokens; no progress bar is drawn."""
    directory, path = build_model(tmp_path / "made"), tmp_path / "Tiny.F32.gguf"
    expected = load_model(directory)
    _write_gguf(gguf, expected.model, expected.tokenizer, path)
    capsys.readouterr()
    loaded = load_model(path)
    assert "it/s]" not in capsys.readouterr().err
    assert (loaded.name, loaded.architecture, loaded.dtype) == (
        "Tiny.F32",
        "LlamaForCausalLM",
        torch.float32,
    )
    assert (loaded.context_window, loaded.eos_ids) == (expected.context_window, expected.eos_ids)
    text = "once upon a time there was"
    token_ids = expected.tokenizer.encode(text)
    assert loaded.tokenizer.encode(text) == token_ids
    with torch.inference_mode():
        found, wanted = (
            each.model(torch.tensor([token_ids])).logits for each in (loaded, expected)
        )
    assert torch.allclose(found, wanted, atol=1e-5)
    assert loaded.fingerprint == model_fingerprint(path)
    unnamed = load_model(path.rename(tmp_path / "Tiny.F32"))  # a possible name of a unit's model
    assert (unnamed.name, unnamed.dtype, unnamed.fingerprint) == (
        "Tiny.F32",
        torch.float32,
        loaded.fingerprint,
    )


def test_a_truncated_file_is_refused(tmp_path):
    """As after an aborted download: at its beginning, or among the weights."""
    directory, path = build_model(tmp_path / "made"), tmp_path / "cut.gguf"
    made = load_model(directory)
    _write_gguf(gguf, made.model, made.tokenizer, path)
    whole = path.read_bytes()
    for length in (8, len(whole) - 1000):
        path.write_bytes(whole[:length])
        with pytest.raises(UnsupportedModelError, match="it may be incomplete"):
            load_model(path)


def test_a_quantized_model_in_a_file_is_dequantized(tmp_path):
    """To the dtype of the service."""
    directory, path = build_model(tmp_path / "made"), tmp_path / "Tiny.Q8_0.gguf"
    expected = load_model(directory)
    _write_gguf(gguf, expected.model, expected.tokenizer, path, gguf.GGMLQuantizationType.Q8_0)
    weights = load_model(path, dtype="float32").model.state_dict()
    assert weights.keys() == expected.model.state_dict().keys()
    for name, wanted in expected.model.state_dict().items():
        assert weights[name].dtype == torch.float32
        assert torch.allclose(weights[name], wanted, atol=float(wanted.abs().max()) / 127)


LAYER_TENSORS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _write_gguf(gguf, model, tokenizer, path, kind=None):
    """Write a Llama as llama.cpp's converter does: rotary pairs are adjacent."""
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    vocabulary = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(config.eos_token_id)
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for layer in range(config.num_hidden_layers):
        for name, found in LAYER_TENSORS.items():
            names[f"blk.{layer}.{name}"] = f"model.layers.{layer}.{found}"
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, found in names.items():
        tensor = weights[f"{found}.weight"]
        if num_heads := heads.get(name.rsplit(".", 1)[-1]):
            halves = tensor.reshape(num_heads, 2, config.head_dim // 2, config.hidden_size)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        content = tensor.contiguous().numpy()
        if kind is None or content.ndim < 2:
            writer.add_tensor(f"{name}.weight", content)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(content, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
