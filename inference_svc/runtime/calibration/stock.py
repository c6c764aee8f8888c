"""The stock model: a model with its own attention, whose logits every mode is compared with.

Its rotary frequencies are those that `rope_tables.freeze_rotary` has set.

It also gives logits after the first tokens were removed from its cache (`_truncated_logits`). With
RoPE only differences of positions matter: if all positions of a history are lowered by `n` in its
rotary modules, its hidden states are the same, and its keys are embedded `n` positions earlier. So
the history is run like that, its first tokens are cut off, and the stock model continues at the new
positions. Only the rotary modules receive the lower positions, since some models also scale queries
by their position.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicIndexedLayer

from inference_svc.runtime.model.capture import ForwardCall
from inference_svc.runtime.model.model_loader import LoadedModel

SAME = 1e-4  # relative distance up to which values that must not change count as the same
PROOF_TOKENS = 48
NOT_STORED = 8  # number of the proof's last tokens, which follow a load
PLAINEST = "eager"  # Transformers' name of the attention that every model has
# Largest relative distance of our logits to the stock model's. Keys one position off give 0.2 in a
# trained model, 0.03 in a small random one; rounding gives 1e-6, 1e-3 and 1e-2.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# In 16 bits the logits of deep models differ more between kernels. The tolerance then is a multiple
# of the distance between the stock model's own logits, computed in equally correct ways.
ROUNDING_FACTOR = 3
MOST_TOLERANCE = 0.15


@dataclass(frozen=True, eq=False)
class StockLogits:
    """The stock model's logits, float32 on the CPU.

    Attributes:
        whole: [PROOF_TOKENS, vocab], the logits of all tokens.
        truncated: [NOT_STORED, vocab], the logits of the last tokens after the first `num_dropped`
            were removed from the cache; None: this model's cache does not support that.
        is_causal: whether the first half of the tokens alone gives the first half of `whole`.
        rounding: relative distance between logits that are equally correct; see `_rounding`.
        indexes: by layer [tokens, index_dim], the index keys of the history behind the dropped
            tokens, at its new positions; only of layers that have index keys.
    """

    whole: Tensor
    truncated: Tensor | None
    is_causal: bool
    rounding: float = 0.0
    indexes: Mapping[int, Tensor] = field(default_factory=dict)


def proof_tokens(loaded: LoadedModel, most_tokens: int = PROOF_TOKENS) -> list[int]:
    """Return deterministic token ids that repeat only after the whole vocabulary."""
    num_tokens = min(most_tokens, loaded.context_window - 1)
    return [(37 * i + 11) % loaded.vocab_size for i in range(num_tokens)]


def num_dropped(num_stored: int) -> int:
    """Return the number of stored tokens that the proof's truncation drops: the first third."""
    return num_stored // 3


def can_set_attention(model: Any) -> bool:
    """Whether the model looks its attention function up by name at each call."""
    return bool(type(model)._can_set_attn_implementation())  # noqa: SLF001 - the only way to ask


def stock_attentions(model: Any) -> list[str]:
    """Return the names of the model's own attention functions, fastest first."""
    if not can_set_attention(model):
        return [model.config._attn_implementation]  # noqa: SLF001 - chosen when it was built
    return ["sdpa", "eager"] if getattr(model, "_supports_sdpa", False) else ["eager"]


def use_attention(model: Any, name: str) -> None:
    """Set the model to an attention function, where that can be chosen."""
    if model.config._attn_implementation != name:  # noqa: SLF001 - the only way to ask
        model.set_attn_implementation(name)


@torch.inference_mode()
def stock_logits(loaded: LoadedModel) -> StockLogits:
    """Run the stock model with its plainest (and slowest) attention.

    Raises:
        Exception: from the model.
    """
    with stock_attention(loaded.model):
        token_ids = torch.tensor([proof_tokens(loaded)], device=loaded.device)
        whole = _whole_logits(loaded, token_ids)
        half = token_ids.shape[1] // 2
        rounding = _rounding(loaded, token_ids, whole)
        part = _whole_logits(loaded, token_ids[:, :half])
        is_causal = is_same(part, whole[:half], loaded.dtype, rounding)
        try:
            stored = token_ids.shape[1] - NOT_STORED
            cut, indexes = _truncated_logits(loaded.model, token_ids, stored, num_dropped(stored))
            truncated = cut.float().cpu()
        except Exception:  # noqa: BLE001 - models' caches may fail in any way
            truncated, indexes = None, {}
    return StockLogits(whole.float().cpu(), truncated, is_causal, rounding, indexes)


def _rounding(loaded: LoadedModel, token_ids: Tensor, whole: Tensor) -> float:
    """Return the relative distance of the stock model's logits to those of its other code paths.

    These are its other attention function, and the last tokens computed over a cache. Returns 0 in
    float32, where a fixed tolerance is enough, and if there is no other path.
    """
    if loaded.dtype == torch.float32:
        return 0.0
    found = [0.0]
    attentions = stock_attentions(loaded.model) if can_set_attention(loaded.model) else []
    for name in (attention for attention in attentions if attention != PLAINEST):
        with suppress(Exception), stock_attention(loaded.model, name):
            logits = _whole_logits(loaded, token_ids)
            found.append(logits_distance(logits.float(), whole.float(), loaded.dtype))
    with suppress(Exception):
        stored = token_ids.shape[1] - NOT_STORED
        logits, _ = _truncated_logits(loaded.model, token_ids, stored, 0)
        found.append(logits_distance(logits.float(), whole[stored:].float(), loaded.dtype))
    return max(number for number in found if math.isfinite(number))


@torch.inference_mode()
def last_logits(loaded: LoadedModel, token_ids: list[int], num_last: int) -> Tensor:
    """Run the stock model over tokens.

    Returns:
        [num_last, vocab] float32 on the CPU, the logits of the last tokens.

    Raises:
        Exception: from the model.
    """
    with stock_attention(loaded.model):
        whole = _whole_logits(loaded, torch.tensor([token_ids], device=loaded.device))
    return whole[-num_last:].float().cpu()


@torch.inference_mode()
def answers_as(loaded: LoadedModel, reference: StockLogits) -> bool:
    """Whether the stock model still gives the reference's logits.

    Raises:
        Exception: from the model.
    """
    with stock_attention(loaded.model):
        token_ids = torch.tensor([proof_tokens(loaded)], device=loaded.device)
        whole = _whole_logits(loaded, token_ids)
    return is_same(whole.float().cpu(), reference.whole, loaded.dtype, reference.rounding)


def _whole_logits(loaded: LoadedModel, token_ids: Tensor) -> Tensor:
    """Return the logits of every token, [tokens, vocab], for token ids [1, tokens]."""
    logits: Tensor = loaded.model(input_ids=token_ids, use_cache=False).logits[0]
    return logits


def _truncated_logits(
    model: Any, token_ids: Tensor, num_stored: int, dropped: int
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute logits after the history's first tokens were removed from the cache.

    A model without rotary modules continues at unchanged positions: distances are the same.

    Args:
        model: the model, set to its own attention.
        token_ids: [1, tokens].
        num_stored: number of tokens of the history.
        dropped: number of the history's first tokens to remove.

    Returns:
        Logits of the tokens behind the history, [tokens - num_stored, vocab]; and the index keys by
        which they choose, see `StockLogits.indexes`.

    Raises:
        Exception: the model's cache does not support this.
    """
    rotaries = [module for module in model.modules() if "rotary" in type(module).__name__.lower()]
    history, new = token_ids[:, :num_stored], token_ids[:, num_stored:]
    call, device = ForwardCall(model), token_ids.device
    whole = _plain_cache()
    none = torch.arange(0, device=device)
    with _moved_positions(rotaries, by=-dropped):
        call(history, torch.arange(num_stored, device=device)[None], none, whole)
    first = num_stored - dropped if rotaries else num_stored
    positions = torch.arange(first, first + new.shape[1], device=device)[None]
    logit_indices = torch.arange(new.shape[1], device=device)
    cut = _without_first(whole, dropped)
    layers: list[Any] = list(cut.layers)
    indexes = {
        layer_index: layer.indexer_keys[0].float().cpu()
        for layer_index, layer in enumerate(layers)
        if layer.is_indexer_initialized
    }
    return call(new, positions, logit_indices, cut), indexes


def _plain_cache() -> DynamicCache:
    """Return a cache of keys, values and index keys whose layers keep all tokens."""
    cache = DynamicCache()  # with a config, layers would drop tokens that have left their window
    cache.layer_class_to_replicate = DynamicIndexedLayer
    return cache


def _without_first(cache: DynamicCache, dropped: int) -> DynamicCache:
    cut = _plain_cache()
    layers: list[Any] = list(cache.layers)
    for layer_index, layer in enumerate(layers):
        keys, values = layer.keys, layer.values
        cut.update(keys[..., dropped:, :], values[..., dropped:, :], layer_index)
        if layer.is_indexer_initialized:
            cut.update_indexer(layer.indexer_keys[:, dropped:], layer_index)
    return cut


@contextmanager
def _moved_positions(rotaries: list[Any], by: int) -> Iterator[None]:
    """Add `by` to the positions that the rotary modules receive, inside the block."""

    def shift(value: Any) -> Any:
        is_positions = isinstance(value, Tensor) and not value.is_floating_point()
        return value + by if is_positions else value

    def hook(_module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return tuple(map(shift, args)), {name: shift(value) for name, value in options.items()}

    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in rotaries]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_same(logits: Tensor, expected: Tensor, dtype: torch.dtype, rounding: float = 0.0) -> bool:
    """Whether logits equal the expected ones up to rounding in `dtype`; False if any are NaN.

    Args:
        logits: [tokens, vocab].
        expected: [tokens, vocab].
        dtype: the model's dtype.
        rounding: the model's rounding, see StockLogits.
    """
    return logits_distance(logits, expected, dtype) <= tolerance(dtype, rounding)


def tolerance(dtype: torch.dtype, rounding: float) -> float:
    """Return the largest relative distance that rounding explains."""
    least = TOLERANCE[dtype]
    return max(least, min(ROUNDING_FACTOR * rounding, MOST_TOLERANCE))


def distance(value: Tensor, reference: Tensor) -> float:
    """Return the largest difference of two tensors of one shape, relative to the largest value."""
    reference = reference.float()
    return float((value.float() - reference).abs().max() / reference.abs().max().clamp_min(1e-30))


def logits_distance(logits: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    """Return the relative distance of logits, [tokens, vocab].

    In 16 bits it is the median over tokens. There single tokens are far off in the stock model too,
    between forwards of different lengths: those with small logits, or for which rounding has chosen
    another expert. Wrong positions or masks show in all tokens.
    """
    if dtype == torch.float32:
        return float((logits - expected).norm() / expected.norm())
    return float(((logits - expected).norm(dim=1) / expected.norm(dim=1)).median())


@contextmanager
def stock_attention(model: Any, name: str = PLAINEST) -> Iterator[None]:
    """Set the model to an attention function of its own inside the block."""
    before = model.config._attn_implementation  # noqa: SLF001 - the only way to ask
    if can_set_attention(model):
        use_attention(model, name)
    try:
        yield
    finally:
        use_attention(model, before)
