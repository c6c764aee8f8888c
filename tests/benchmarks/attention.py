"""Attention on a CPU: our kernels beside torch, and beside a read of the KV.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.attention [--new 256] [--dtype bfloat16]

Without `--new` these are decode steps, else steps of prompts with so many new tokens. Every step
attends once over a layer's KV of each sequence; layers differ, so that KV comes from memory. All
three take turns in a round. Shown are the medians of microseconds of a layer, CPU time of the
thread that computes, and the medians of the rounds' ratios.
"""

import argparse
import statistics
import sys

import torch

from inference_svc.runtime.attention.attention import Part, TorchAttention
from inference_svc.runtime.attention.softmax_attention import AttentionOptions
from inference_svc.runtime.cpu.attention_kernel import AttentionKernel
from inference_svc.runtime.cpu.cpu_attention import CpuAttention
from inference_svc.runtime.kv.kv_pool import KVPool
from inference_svc.runtime.kv.layer_tensors import LayerShape
from tests.benchmarks.rounds import measure_in_turns, median_ratio

# (query heads, key heads, head_dim) of a layer.
MODELS = {
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Llama-3.2-1B": (32, 8, 64),
    "Llama-3.1-8B": (32, 8, 128),
}
LENGTHS, BATCHES = (256, 1024, 4096), (1, 8)
MOST_BYTES = 2**30  # of KV


def main():
    """Measure all shapes, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--new", type=int, default=1, help="new tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    kernel = CpuAttention(AttentionKernel.load())
    sys.stdout.write(
        "| layer of | batch | tokens | torch | kernel | read | kernel / torch | kernel / read |\n"
    )
    sys.stdout.write("|---|---|---|---|---|---|---|---|\n")
    for name, sizes in MODELS.items():
        for batch in BATCHES:
            for length in LENGTHS:
                tokens = (batch, length, min(asked.new, length))
                found = measure(sizes, tokens, getattr(torch, asked.dtype), kernel, asked.rounds)
                figures = [
                    f"{statistics.median(found[way]):.0f} µs" for way in ("torch", "kernel", "read")
                ]
                figures += [
                    f"{median_ratio(found, 'kernel', way):.2f}" for way in ("torch", "read")
                ]
                sys.stdout.write(f"| {name} | {batch} | {length:,} | {' | '.join(figures)} |\n")
                sys.stdout.flush()


def measure(sizes, tokens, dtype, kernel, num_rounds):
    """Return the microseconds of a layer, by way and round.

    Args:
        sizes: see MODELS.
        tokens: number of sequences, tokens of each, and how many of these are new.
        dtype: of queries and KV.
        kernel: our back-end.
        num_rounds: number of rounds.
    """
    (heads, kv_heads, dim), (batch, length, num_new) = sizes, tokens
    layer_bytes = 2 * batch * length * kv_heads * dim * dtype.itemsize
    num_layers = max(2, min(32 // num_new, MOST_BYTES // layer_bytes))
    parts = filled_parts((kv_heads, dim), num_layers, tokens, dtype)
    query = torch.randn(1, batch * num_new, heads, dim, dtype=dtype).transpose(1, 2)
    ways = {
        "torch": lambda: attend(TorchAttention(), parts, query, num_layers),
        "kernel": lambda: attend(kernel, parts, query, num_layers),
        "read": lambda: read(parts),
    }
    found = measure_in_turns(ways, num_rounds)
    return {way: [s / num_layers * 1e6 for s in rounds] for way, rounds in found.items()}


def filled_parts(sizes, num_layers, tokens, dtype):
    """Return parts with KV of random numbers; tokens: see `measure`."""
    batch, length, num_new = tokens
    shapes = [LayerShape(sizes, sizes)] * num_layers
    pool = KVPool(shapes, batch * length, device=torch.device("cpu"), dtype=dtype)
    kvs = [pool.new_kv(length) for _ in range(batch)]
    for kv in kvs:
        kv.num_tokens = length - num_new
        for tensor in (*kv.keys.layers, *kv.values.layers):
            tensor.normal_()
    return [Part(kv, num_new) for kv in kvs]


def attend(backend, parts, query, num_layers):
    """Attend in all layers, as a step does."""
    step = backend.prepare(parts)
    for layer_index in range(num_layers):
        step.attend(query, layer_index, AttentionOptions())


def read(parts):
    """Read all KV, as numbers of 32 bits whatever they are."""
    for part in parts:
        for tensor in (*part.kv.keys.layers, *part.kv.values.layers):
            tensor.view(torch.float32).amax()


if __name__ == "__main__":
    main()
