"""Our steps beside Hugging Face's: the same weights, thread, tokens and round. README.md here.

python -m tests.benchmarks.peers.steps [--model DIRECTORY] [--compiled] [--json FILE]

ours          `ModelRunner.step`, what every step of the engine is, and the largest logit taken
compiled      (if asked for) the same with `model.compile = "step"`
transformers  the stock model over its own DynamicCache with sdpa, and the largest logit taken
floor         (decode) the bytes of weights and KV, at the speed at which this machine reads
              memory, measured in the same round
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from inference_svc.bench.decode import MemoryReader
from inference_svc.runtime.calibration.attention_choice import choose_attention
from inference_svc.runtime.calibration.calibration import calibrate
from inference_svc.runtime.calibration.compile_choice import choose_compiling
from inference_svc.runtime.compute.chunk import Chunk
from inference_svc.runtime.compute.model_runner import ModelRunner
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.memory import keep_freed_memory
from inference_svc.runtime.model.model_loader import LoadedModel, describe_model, load_model

# SmolLM2-135M's shape: it decides the speed of a step; its weights do not.
SHAPE = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


class Ours:
    """Steps of our runner over working KV of a pool.

    Attributes:
        token_bytes: bytes of a token's KV.
    """

    def __init__(self, loaded: LoadedModel, num_token_slots: int) -> None:
        calibration = self._calibration = calibrate(loaded, packing="auto")
        shapes = [layer.shape for layer in calibration.layers]
        self._pool = KVPool(shapes, num_token_slots, device=loaded.device, dtype=loaded.dtype)
        self._pool.prefault()
        self._attention = choose_attention("auto", loaded, calibration, None)
        self._loaded = loaded
        self._runner = ModelRunner(loaded, calibration, self._attention)
        self.token_bytes = calibration.layout.token_bytes

    def compiled(self) -> "Ours":
        """Return the same steps, compiled and proven, over the same pool."""
        model = self._loaded, self._calibration
        with tempfile.TemporaryDirectory() as directory:
            for name in ("step", "auto"):  # compiled, and then remembered, as by a later start
                began_s, began_bytes = time.process_time(), psutil.Process().memory_info().rss
                forward = choose_compiling(name, *model, Path(directory) / "forwards")
                assert forward is not None
                seconds = time.process_time() - began_s
                more_bytes = psutil.Process().memory_info().rss - began_bytes
                sys.stdout.write(
                    f"{name}: {len(forward.graphs)} graphs, {seconds:.1f} CPU seconds, "
                    f"{more_bytes >> 20} MiB\n"
                )
        other = copy.copy(self)
        other._runner = ModelRunner(
            self._loaded, self._calibration, self._attention, compiled=forward
        )
        return other

    def history(self, prompts: Sequence[list[int]], num_more: int) -> Any:
        """Compute prompts, with room for more tokens; return the state for `decode`."""
        kvs = [self._pool.new_kv(len(prompt) + num_more) for prompt in prompts]
        for kv, prompt in zip(kvs, prompts, strict=True):
            self._runner.step([Chunk(kv, prompt, want_logits=False)])
        return kvs

    def release(self, history: Any) -> None:
        """Free the history's memory."""
        for kv in history:
            self._pool.release(kv)

    def decode(self, history: Any, token_ids: list[int], num_steps: int) -> list[list[int]]:
        """Decode greedily after one token each; the history is unchanged afterwards."""
        lengths, chosen = [kv.num_tokens for kv in history], []
        for _ in range(num_steps):
            chunks = [
                Chunk(kv, [token_id], want_logits=True)
                for kv, token_id in zip(history, token_ids, strict=True)
            ]
            token_ids = self._runner.step(chunks).argmax(dim=1).tolist()
            chosen.append(token_ids)
        for kv, length in zip(history, lengths, strict=True):
            kv.num_tokens = length
        return chosen

    def prefill(self, prompt: list[int], chunk_tokens: int) -> int:
        """Compute a prompt in chunks; return the next token."""
        kv = self._pool.new_kv(len(prompt))
        logits = torch.zeros(0)
        for first in range(0, len(prompt), chunk_tokens):
            piece = prompt[first : first + chunk_tokens]
            is_last = first + chunk_tokens >= len(prompt)
            logits = self._runner.step([Chunk(kv, piece, want_logits=is_last)])
        self._pool.release(kv)
        return int(logits.argmax())


class Transformers:
    """The stock model; made before ours is calibrated, over the same weights."""

    def __init__(self, loaded: LoadedModel) -> None:
        shared: dict[int, Any] = {id(weights): weights for weights in loaded.model.parameters()}
        self._model = copy.deepcopy(loaded.model, shared)
        self._model.set_attn_implementation("sdpa")

    @torch.inference_mode()
    def history(self, prompts: Sequence[list[int]], _num_more: int) -> Any:
        """Compute prompts of one length; see above."""
        cache = DynamicCache()
        self._model(input_ids=torch.tensor(prompts), past_key_values=cache, logits_to_keep=1)
        return cache

    def release(self, _history: Any) -> None:
        """Do nothing: garbage collection frees it."""

    @torch.inference_mode()
    def decode(self, history: Any, token_ids: list[int], num_steps: int) -> list[list[int]]:
        """Decode greedily; see above."""
        chosen, last = [], torch.tensor(token_ids)[:, None]
        for _ in range(num_steps):
            answer = self._model(input_ids=last, past_key_values=history, use_cache=True)
            last = answer.logits[:, -1:].argmax(dim=2)
            chosen.append(last[:, 0].tolist())
        history.crop(-num_steps)
        return chosen

    @torch.inference_mode()
    def prefill(self, prompt: list[int], _chunk_tokens: int) -> int:
        """Compute a prompt at once; see above."""
        answer = self._model(
            input_ids=torch.tensor([prompt]),
            past_key_values=DynamicCache(),
            use_cache=True,
            logits_to_keep=1,
        )
        return int(answer.logits.argmax())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each part and way."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    keep_freed_memory()
    loaded = _model(asked.model, asked.dtype)
    reader = MemoryReader(loaded.device)
    peers = {"transformers": Transformers(loaded)}
    slots = (1 + asked.compiled) * max(asked.batches) * (asked.history + asked.steps) + asked.prompt
    ours = Ours(loaded, slots)
    ways: dict[str, Any] = {"ours": ours, **peers}
    if asked.compiled:
        ways["compiled"] = ours.compiled()
    found: dict[str, Any] = {}
    for batch in asked.batches:
        found[f"decode {batch}"] = _decode(asked, ways, batch, reader, loaded, ours.token_bytes)
    if asked.prompt:
        found[f"prefill {asked.prompt}"] = _prefill(asked, ways)
    for part, figures in found.items():
        _show(part, figures)
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=2) + "\n")


Figures = dict[str, list[float]]  # tokens a second, by way and round


def _decode(
    asked: argparse.Namespace,
    ways: dict[str, Any],
    batch: int,
    reader: MemoryReader,
    loaded: LoadedModel,
    token_bytes: int,
) -> Figures:
    """Decode from equal histories; all ways must choose the same tokens."""
    prompts = [_tokens(loaded, asked.history, seed) for seed in range(batch)]
    last = [prompt[0] for prompt in prompts]
    histories = {name: way.history(prompts, asked.steps) for name, way in ways.items()}
    step_bytes = loaded.num_weights * loaded.dtype.itemsize
    step_bytes += batch * (asked.history + asked.steps // 2) * token_bytes
    chosen: dict[str, Any] = {}

    def once(name: str) -> float:
        seconds, chosen[name] = _cpu_seconds(
            lambda: ways[name].decode(histories[name], last, asked.steps)
        )
        return batch * asked.steps / seconds

    figures = _rounds(asked, {name: lambda name=name: once(name) for name in ways})
    figures["floor"] = [batch * reader.bytes_per_s() / step_bytes for _ in range(asked.rounds)]
    for name, way in ways.items():
        way.release(histories[name])
    _check_same(f"decode {batch}", chosen)
    return figures


def _prefill(asked: argparse.Namespace, ways: dict[str, Any]) -> Figures:
    prompt = _tokens(None, asked.prompt, seed=0)
    chosen: dict[str, Any] = {}

    def once(name: str) -> float:
        seconds, chosen[name] = _cpu_seconds(lambda: ways[name].prefill(prompt, asked.chunk))
        return asked.prompt / seconds

    figures = _rounds(asked, {name: lambda name=name: once(name) for name in ways})
    _check_same("prefill", chosen)
    return figures


def _rounds(asked: argparse.Namespace, ways: dict[str, Callable[[], float]]) -> Figures:
    """Alternate: each round begins with another way, and the first round is not counted."""
    names = list(ways)
    figures: Figures = {name: [] for name in names}
    for number in range(-1, asked.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            tokens_per_s = ways[name]()
            if number >= 0:
                figures[name].append(tokens_per_s)
    return figures


def _cpu_seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of this thread for a call, since neighbours share the machine."""
    began_s = time.thread_time()
    result = call()
    return time.thread_time() - began_s, result


def _check_same(part: str, chosen: dict[str, Any]) -> None:
    others = {name: result for name, result in chosen.items() if result != chosen["ours"]}
    if others:
        sys.stderr.write(f"{part}: {', '.join(others)} chose other tokens\n")


def _show(part: str, figures: Figures) -> None:
    """Print medians, and the median of each round's ratio to the others."""
    for name, speeds in figures.items():
        ratios = [mine / other for mine, other in zip(figures["ours"], speeds, strict=True)]
        sys.stdout.write(
            f"{part:14} {name:13} {statistics.median(speeds):8.2f} tokens/s"
            f"   ours / it {statistics.median(ratios):.3f}\n"
        )


def _tokens(loaded: LoadedModel | None, number: int, seed: int) -> list[int]:
    vocab = SHAPE["vocab_size"] if loaded is None else loaded.vocab_size
    return [(37 * index + 101 * seed + 11) % vocab for index in range(number)]


def _model(path: Path | None, dtype: str) -> LoadedModel:
    if path is not None:
        return load_model(path, dtype)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(
        torch.float32 if dtype == "auto" else getattr(torch, dtype)
    )
    return describe_model(model, tokenizer=None, name="random", fingerprint="0" * 32)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="directory; without it, random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compiled", action="store_true", help="also our steps, compiled")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--history", type=int, default=256, help="tokens before decoding")
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens to prefill; 0: none")
    parser.add_argument("--chunk", type=int, default=512, help="of our prefill, in tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for every round's figures")
    return parser


if __name__ == "__main__":
    main()
