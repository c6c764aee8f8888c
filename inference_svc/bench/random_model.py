"""Builds a model of a preset's shape with random weights, in memory."""

import hashlib
import json

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inference_svc.bench.options import ModelChoice
from inference_svc.bench.presets import Shape, preset
from inference_svc.core.errors import UnknownModelError, UnsupportedModelError
from inference_svc.runtime.model.model_loader import LoadedModel, describe_model, load_model
from shared.measuring.workspace import NoRoomError
from shared.types.units import format_bytes

MIN_WINDOW_TOKENS = 4096


def chosen_model(choice: ModelChoice, window_tokens: int) -> LoadedModel:
    """Load the directory, or build the preset, that a run was told.

    Args:
        choice: the run's.
        window_tokens: that the run needs: a preset gets as many positions.

    Raises:
        UnknownModelError: neither or both were named.
        UnsupportedModelError: the directory's model has fewer positions.
    """
    if (choice.path is None) == (not choice.random):
        raise UnknownModelError(
            "the bench measures one model", "give --model DIRECTORY or --random PRESET"
        )
    if choice.path is None:
        shape = preset(choice.random, choice.layers)
        return random_model(choice, shape, max(MIN_WINDOW_TOKENS, window_tokens))
    loaded = load_model(choice.path, choice.dtype, choice.device)
    if 0 < loaded.context_window < window_tokens:
        raise UnsupportedModelError(
            f"{loaded.name} has {loaded.context_window} positions, the bench wants {window_tokens}",
            "measure shorter histories, or another model",
        )
    return loaded


def random_model(choice: ModelChoice, shape: Shape, window_tokens: int) -> LoadedModel:
    """Build a Llama of that shape; dtype "auto" is float32.

    Raises:
        NoRoomError: it does not fit into memory.
    """
    dtype = torch.float32 if choice.dtype == "auto" else getattr(torch, choice.dtype)
    device = torch.device(choice.device)
    _check_room(shape, choice, device, dtype)
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=window_tokens,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,  # answers have the length that is asked for
        pad_token_id=None,
    )
    torch.manual_seed(choice.seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    identity = {**shape.as_dict(), "window": window_tokens, "seed": choice.seed}
    text = json.dumps(identity, sort_keys=True)
    return describe_model(
        model,
        tokenizer=None,
        name=choice.random,
        fingerprint=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    )


def _check_room(
    shape: Shape, choice: ModelChoice, device: torch.device, dtype: torch.dtype
) -> None:
    needed = shape.num_weights * dtype.itemsize
    available = psutil.virtual_memory().available
    if device.type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    if needed > available:
        raise NoRoomError(
            f"{choice.random} has {format_bytes(needed)} of weights,"
            f" {format_bytes(available)} of memory are available",
            "take fewer layers with --layers, or a smaller dtype with --dtype",
        )
