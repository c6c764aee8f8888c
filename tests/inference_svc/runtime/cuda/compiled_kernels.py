"""Compiles the kernels for GPUs that need not be present, and prints their resources.

Run it without TRITON_INTERPRET, in a process of its own: `python -m
tests.inference_svc.runtime.cuda.compiled_kernels 90:bfloat16:128 ...` prints a line of JSON for
each kernel of each case `ARCHITECTURE:DTYPE:HEAD_DIM`. With `--of-each` first, each kernel is
compiled in one of its ways only.
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource

from inference_svc.runtime.cuda import slot_copies
from inference_svc.runtime.cuda.kernels.key_rotation import embed_keys
from inference_svc.runtime.cuda.kernels.page_attention import attend_tile, merge_splits
from inference_svc.runtime.cuda.kernels.slot_copies import copy_tokens
from inference_svc.runtime.cuda.key_rotation import WARPS, rows_of_program
from inference_svc.runtime.cuda.page_attention import (
    MIN_ROWS,
    SPLIT_TOKENS,
    TileShape,
    shape_of_part,
    tile_shape,
)

NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
GROUP = 4
TOOLS = Path(driver.__file__).parent / "bin"
# The launcher finds these: addresses and strides that are multiples of 16.
DIVISIBLE = {"out", "query", "keys", "values", "found", "region", "cosines", "sines"}
INTEGERS = {"tables", "starts", "lengths", "tiles"}
LONG_INTEGERS = {"slots", "source", "partner"}
MULTIPLY_ADD = re.compile(r"\bfma\.rn\S*\s+\S+, (\S+), (\S+), (\S+);")
CONSTANT = re.compile(r"\bmov\.b\d+\s+(\S+), -?\w+;")


def compile_kernel(kernel, constants, types, architecture, warps, *, stages=2, fuses=True):
    """Compile a kernel.

    Returns:
        Its name, stack and shared memory in bytes, registers, and how many multiply-adds there are
        that round once.
    """
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if name in DIVISIBLE or "stride" in name
        },
    )
    found = triton.compile(
        source,
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses},
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(found.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", cubin.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "kernel": kernel.fn.__name__,
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": found.metadata.shared,
        "fused": num_fused(found.asm["ptx"]),
    }


def num_fused(ptx):
    """Count multiply-adds of three numbers; with 1 or -0 among them it is a sum, or a product."""
    constants = {*CONSTANT.findall(ptx)}
    return sum(constants.isdisjoint(factors) for factors in MULTIPLY_ADD.findall(ptx))


def attend_case(architecture, dtype, dim, shape: TileShape, *, split_tokens=None, **options):
    """Compile the attention of tiles of a shape; or of splits, 0: without a fixed length."""
    is_split = split_tokens is not None
    pointer = f"*{NAMES[dtype]}"
    constants = {
        "PAGE_TOKENS": 16,
        "GROUP": GROUP,
        "TOKENS": 1 if split_tokens else shape.rows // GROUP,
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "SPLIT": split_tokens or 0,
        "DIM": dim,
        "BLOCK_DIM": triton.next_power_of_2(dim),
        "VALUE_DIM": dim,
        "BLOCK_VALUE_DIM": triton.next_power_of_2(dim),
        "WINDOW": 0,
        "CHUNK": 0,
        "HAS_SOFTCAP": False,
        "HAS_SINKS": not is_split,
        "IS_SPLIT": is_split,
        "PRECISION": "tf32x3" if dtype == "float32" else "tf32",
        **({"sinks": None} if is_split else {"sums": None}),
        **options,
    }

    def types(name):
        if name in {"out", "sums"} and is_split:
            return "*fp32"
        if name in {"out", "query", "keys", "values", "sinks"}:
            return pointer
        if name in INTEGERS:
            return "*i32"
        return "fp32" if name in {"scale", "softcap"} else "i32"

    return compile_kernel(
        attend_tile, constants, types, architecture, shape.warps, stages=shape.stages
    )


def merge_case(architecture, dtype, dim):
    """Compile the merging of splits."""
    constants = {
        "TOKENS": 1,
        "KEYS": 64,
        "SPLIT": SPLIT_TOKENS,
        "VALUE_DIM": dim,
        "BLOCK_VALUE_DIM": triton.next_power_of_2(dim),
        "WINDOW": 0,
        "CHUNK": 0,
        "HAS_SINKS": True,
    }

    def types(name):
        if name in {"found", "sums"}:
            return "*fp32"
        if name in {"out", "sinks"}:
            return f"*{NAMES[dtype]}"
        return "*i32" if name in INTEGERS else "i32"

    return compile_kernel(merge_splits, constants, types, architecture, 1)


def embed_case(architecture, dtype, table_dtype, dim, width):
    """Compile the embedding of keys with so many rotated elements, by tables of a dtype."""
    constants = {
        "DIM": dim,
        "BLOCK_DIM": triton.next_power_of_2(dim),
        "WIDTH": width,
        "ROWS": rows_of_program(dim),
    }

    def types(name):
        if name in {"cosines", "sines"}:
            return f"*{NAMES[table_dtype]}"
        if name in {"region", "keys"}:
            return f"*{NAMES[dtype]}"
        return "*i64" if name in LONG_INTEGERS else "i32"

    return compile_kernel(embed_keys, constants, types, architecture, WARPS, fuses=False)


def copy_case(architecture, dtype, dim, *, to_slots):
    """Compile copies of tokens of 8 heads, of all layers, between slots and places."""
    shape = slot_copies._shape_of(8 * dim * (4 if dtype == "float32" else 2), 16)
    constants = {
        "ITEMS": shape.items,
        "ITEM_BYTES": shape.item_bytes,
        "BLOCK_ITEMS": shape.block_items,
        "TOKENS": shape.tokens,
        "TO_SLOTS": to_slots,
        "HAS_PLACES": True,
        "HAS_LAYERS": True,
        "ALIGNMENT": 16,
    }

    def types(name):
        if name == "memory":
            return f"*{NAMES[dtype]}"
        if name == "slots":
            return "i64"
        return "i32" if name.startswith("num") or "stride" in name else "*i64"

    return compile_kernel(copy_tokens, constants, types, architecture, slot_copies.WARPS)


def main():
    """Compile the kernels of each case."""
    is_of_each = "--of-each" in sys.argv
    for case in sys.argv[1 + is_of_each :]:
        architecture, dtype, dim = case.split(":")
        target = (int(architecture), dtype, int(dim))
        shape = tile_shape(
            GROUP,
            int(dim),
            int(dim),
            4 if dtype == "float32" else 2,
            is_wide=target[0] in {90, 100},
        )
        single = shape._replace(rows=MIN_ROWS, warps=4, stages=2)
        ways = (
            partial(attend_case, *target, shape_of_part(shape, GROUP, 2)),
            partial(merge_case, *target),
            partial(embed_case, *target[:2], *target[1:], width=int(dim)),
            partial(copy_case, *target, to_slots=True),
        )
        others = (
            partial(attend_case, *target, shape),
            partial(attend_case, *target, shape, split_tokens=0, WINDOW=4096, HAS_SOFTCAP=True),
            partial(attend_case, *target, single, split_tokens=SPLIT_TOKENS),
            partial(embed_case, *target[:2], "float32", int(dim), width=int(dim) // 2),
            partial(copy_case, *target, to_slots=False),
        )
        for compile_one in ways if is_of_each else (*ways, *others):
            found = compile_one()
            sys.stdout.write(json.dumps({"case": case, **found}) + "\n")


if __name__ == "__main__":
    main()
