"""Products of a model's linear layers on a CPU: our kernel beside torch's two, and beside a read.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.products [--dtype bfloat16] [--rounds 9]

Every layer of a model (of as many as fit into MOST_BYTES) is multiplied once with some rows, so
that weights come from memory. `linear` has them as stored, `oneDNN` packed in its own order. All
take turns in a round. Shown are the medians of milliseconds, CPU time of the thread that computes,
and the medians of the rounds' ratios. One row is a decode step, 256 are a chunk of a prompt.
"""

import argparse
import statistics
import sys

import torch
from torch import nn

from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.memory import RegionTensors
from inference_svc.runtime.model.packed_linear import PackedLinear
from inference_svc.runtime.model.packing import OneDnnPacking
from tests.benchmarks.rounds import measure_in_turns, median_ratio

# (outputs, inputs) of the layers of a block.
MODELS = {
    "SmolLM2-135M": [(576, 576)] * 2 + [(192, 576)] * 2 + [(1536, 576)] * 2 + [(576, 1536)],
    "Llama-3.2-1B": [(2048, 2048)] * 2 + [(512, 2048)] * 2 + [(8192, 2048)] * 2 + [(2048, 8192)],
}
ROWS = (1, 2, 4, 8, 16, 64, 256)
MOST_BYTES = 2**29  # of weights
OTHERS = ("linear", "oneDNN", "read")


def main():
    """Measure all models and numbers of rows, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, asked.dtype)
    reason = ProductKernel.load().why_unusable(torch.device("cpu"), dtype)
    if reason:
        sys.exit(reason)
    heads = [*OTHERS, "kernel", *(f"kernel / {other}" for other in OTHERS)]
    sys.stdout.write(f"| layers of | rows | {' | '.join(heads)} |\n{'|---' * (len(heads) + 2)}|\n")
    for name, shapes in MODELS.items():
        layers = make_layers(shapes, dtype)
        for rows in ROWS:
            found = measure(layers, rows, dtype, asked.rounds)
            figures = [
                f"{statistics.median(found[way]) * 1e3:.1f} ms" for way in (*OTHERS, "kernel")
            ]
            figures += [f"{median_ratio(found, 'kernel', other):.2f}" for other in OTHERS]
            sys.stdout.write(f"| {name} | {rows} | {' | '.join(figures)} |\n")
            sys.stdout.flush()


def make_layers(shapes, dtype):
    """Return layers by way; each way has weights of its own."""
    block_bytes = sum(outputs * inputs for outputs, inputs in shapes) * dtype.itemsize
    shapes = shapes * max(1, MOST_BYTES // block_bytes)
    linears = [nn.Linear(*reversed(shape), bias=False, dtype=dtype) for shape in shapes]
    regions = RegionTensors()
    return {
        "linear": linears,
        "oneDNN": [PackedLinear(layer, OneDnnPacking(), regions) for layer in linears],
        "kernel": [PackedLinear(layer, ProductKernel.load(), regions) for layer in linears],
    }


def measure(layers, rows, dtype, num_rounds):
    """Return the seconds that products of some rows with all layers take, by way and round."""
    states = {layer.in_features: None for layer in layers["linear"]}
    states = {size: torch.randn(rows, size).to(dtype) for size in states}

    def multiply(way):
        for layer in layers[way]:
            layer(states[layer.in_features])

    def read():  # as numbers of 32 bits, whatever they are
        for layer in layers["linear"]:
            layer.weight.view(torch.float32).amax()

    ways = {way: lambda way=way: multiply(way) for way in layers} | {"read": read}
    return measure_in_turns(ways, num_rounds)


if __name__ == "__main__":
    main()
