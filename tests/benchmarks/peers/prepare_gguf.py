"""Writes a Llama of Transformers as GGUF in float32, without a vocabulary: for llama.cpp.

python prepare_gguf.py MODEL-DIRECTORY FILE.gguf      (needs numpy, safetensors and gguf)
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

# Names of a layer's weights: Transformers', GGUF's.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(model: Path, file: Path) -> None:
    """Write settings, then weights."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    weights = load_file(model / "model.safetensors")
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    if "lm_head.weight" in weights:
        writer.add_tensor("output.weight", weights["lm_head.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config["num_hidden_layers"]):
        for theirs, name in LAYER_NAMES.items():
            tensor = weights[f"model.layers.{layer}.{theirs}.weight"]
            if name in {"attn_q", "attn_k"}:
                tensor = _interleave(tensor, heads if name == "attn_q" else kv_heads)
            writer.add_tensor(f"blk.{layer}.{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Return rows as llama.cpp rotates them, in neighbouring pairs: Transformers rotates halves."""
    width = tensor.shape[0] // heads
    pairs = tensor.reshape(heads, 2, width // 2, tensor.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(pairs.reshape(tensor.shape))


main(Path(sys.argv[1]), Path(sys.argv[2]))
