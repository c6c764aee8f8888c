"""Model loading: a model directory or GGUF file through Transformers, from the local disk only.

Knows no architecture; `calibration` decides whether the model can be served.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils.logging import disable_progress_bar

from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.model.fingerprint import DigestCache, Fingerprint
from inference_svc.runtime.model.first_position import count_from_zero
from inference_svc.runtime.model.model_directory import check_model, no_progress_bar
from shared.types.kv_layout import ITEM_BYTES

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Names that configs use for the number of positions.
CONTEXT_WINDOW_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")
# Models that use distances instead of positions need not name one. The common ones (BLOOM) were
# trained with this.
UNSTATED_WINDOW = 2048


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be calibrated.

    Attributes:
        model: the Transformers model; typed loosely, as its interface differs between versions.
        tokenizer: None if the directory has none; turns are then token ids only.
        name: the directory's name.
        architecture: the model's class name.
        fingerprint: 128-bit digest in hex, see `fingerprint.py`.
        context_window: most tokens of a context; UNSTATED_WINDOW if the config does not say.
        vocab_size: width of the logits.
        num_weights: number of weights as loaded; shared ones count once.
        eos_ids: ids of the tokens that end an answer.
        device: where the weights are.
        dtype: the weights' element type.
        hashed_bytes: bytes of weights that were read for the fingerprint; 0: all were cached.
        hash_wait_s: seconds from the end of loading to the fingerprint.
    """

    model: Any
    tokenizer: Any | None
    name: str
    architecture: str
    fingerprint: str
    context_window: int
    vocab_size: int
    num_weights: int
    eos_ids: frozenset[int]
    device: torch.device
    dtype: torch.dtype
    hashed_bytes: int = 0
    hash_wait_s: float = 0.0


def load_model(
    path: Path, dtype: str = "auto", device: str = "cpu", digests: Path | None = None
) -> LoadedModel:
    """Load the model in `path`, and fingerprint it at the same time.

    Args:
        path: a directory with config.json and weights, as `save_pretrained` writes it; or a GGUF
            file.
        dtype: "auto" (the config's), "float32", "bfloat16" or "float16".
        device: torch's name of a device, such as "cpu" or "cuda:0".
        digests: the file that caches the digests of weights; None: every byte is read.

    Raises:
        UnknownModelError: there is no model in `path`.
        UnsupportedModelError: the model cannot be loaded, or is not decoder-only.
    """
    check_model(path)
    cache = None if digests is None else DigestCache(digests)
    with Fingerprint(path, cache) as fingerprint:
        model = _from_pretrained(path, dtype)
        model, tokenizer = model.to(_device(device)), _load_tokenizer(path)
        loaded_s = time.monotonic()
        with _one_line(
            f"the fingerprint of {path} cannot be computed",
            "start again when no process writes to it any more",
        ):
            found = fingerprint.result()
        return replace(
            describe_model(model, tokenizer=tokenizer, name=_name_of(path), fingerprint=found),
            hashed_bytes=fingerprint.read_bytes,
            hash_wait_s=time.monotonic() - loaded_s,
        )


def describe_model(
    model: Any, *, tokenizer: Any | None, name: str, fingerprint: str
) -> LoadedModel:
    """Describe a Transformers model that is in memory, and make it count positions from 0.

    Args:
        model: the model, which is set to inference.
        tokenizer: its tokenizer, or None.
        name: the model's name.
        fingerprint: the model's fingerprint.

    Raises:
        UnsupportedModelError: KV cannot be stored in its dtype.
    """
    model.eval().requires_grad_(requires_grad=False)
    config = model.config.get_text_config()
    if str(model.dtype).removeprefix("torch.") not in ITEM_BYTES:
        raise UnsupportedModelError(
            f"model {name} has dtype {model.dtype}",
            f"serve it with one of the dtypes {', '.join(ITEM_BYTES)}",
        )
    windows = (getattr(config, key, None) for key in CONTEXT_WINDOW_KEYS)
    num_positions = next((w for w in windows if isinstance(w, int)), UNSTATED_WINDOW)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        architecture=type(model).__name__,
        fingerprint=fingerprint,
        context_window=num_positions - count_from_zero(model, num_positions),
        vocab_size=config.vocab_size,
        num_weights=sum(weights.numel() for weights in model.parameters()),
        eos_ids=_eos_ids(model),
        device=model.device,
        dtype=model.dtype,
    )


def _from_pretrained(path: Path, dtype: str) -> Any:
    """Load the model's config and weights."""
    folder, gguf = _locate(path)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # a service's stderr is a log
    remedy = "serve a decoder-only model with safetensors weights"
    if gguf:
        remedy = "it may be incomplete: compare its size with the original; or serve another model"
    with (
        _one_line(f"{path} cannot be loaded", remedy),
        no_progress_bar() if gguf else nullcontext(),
    ):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **gguf)
        if config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{path} contains an encoder-decoder model", "serve a decoder-only model"
            )
        if gguf:
            gguf["quantization_config"] = GgufConfig(dequantize=True)
            # Transformers' own choice, except for files whose names do not end in .gguf.
            dtype = "float32" if dtype == "auto" else dtype
        return AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,  # unpickling a file would run its code
            trust_remote_code=False,
            **gguf,
        )


def _locate(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the directory to load from, and Transformers' arguments for a GGUF file in it."""
    return (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})


def _name_of(path: Path) -> str:
    found = path.resolve()
    return found.name.removesuffix(".gguf") if found.is_file() else found.name


@contextmanager
def _one_line(problem: str, remedy: str) -> Iterator[None]:
    """Turn any error of Transformers into a one-line UnsupportedModelError.

    Files may contain anything, so Transformers may raise anything.
    """
    try:
        yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise UnsupportedModelError(f"{problem} ({cause})", remedy) from error


def _device(device: str) -> torch.device:
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedModelError(
            f"the device {device!r} cannot be used on this machine",
            "use cpu, or cuda on a machine with a GPU",
        ) from error
    return found


def _load_tokenizer(path: Path) -> Any | None:
    folder, gguf = _locate(path)
    if not gguf and not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    with _one_line(f"the tokenizer in {path} cannot be loaded", "repair or remove its files"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **gguf)


def _eos_ids(model: Any) -> frozenset[int]:
    """Collect the ids of end tokens; a config may have a number, a list or nothing."""
    ids: set[int] = set()
    for config in (
        getattr(model, "generation_config", None),
        model.config,
        model.config.get_text_config(),
    ):
        value = getattr(config, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
