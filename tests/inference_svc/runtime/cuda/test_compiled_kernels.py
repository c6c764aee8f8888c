"""The kernels compile for existing GPUs, and no program needs more than a GPU has."""

import json
import os
import platform
import subprocess
import sys

import pytest

# Shared memory available to a program, in bytes: A100, H100 and B200.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
ALL = [
    f"{architecture}:{dtype}:{dim}"
    for architecture in SHARED_BYTES
    for dtype in ("bfloat16", "float16", "float32")
    for dim in (64, 128, 256)
]
SOME = ["90:bfloat16:64"]

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="Triton's compiler comes for x86-64"
)


def compile_cases(cases, directory):
    """Compile in a process that does not interpret; return the resources of each kernel."""
    environ = {**os.environ, "TRITON_CACHE_DIR": str(directory)}
    del environ["TRITON_INTERPRET"]
    run = subprocess.run(
        [sys.executable, "-m", "tests.inference_svc.runtime.cuda.compiled_kernels", *cases],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(found, num_kernels):
    """Check that fast cases spill no registers, and that everything fits."""
    assert len(found) == num_kernels
    for kernel in found:
        architecture, dtype, _ = kernel["case"].split(":")
        assert kernel["shared_bytes"] <= SHARED_BYTES[int(architecture)], kernel
        if dtype != "float32":  # which is not used on a GPU for speed
            assert kernel["stack_bytes"] == 0, kernel
        if kernel["kernel"] == "embed_keys":  # with torch's bits
            assert kernel["stack_bytes"] == kernel["fused"] == 0, kernel
        elif kernel["kernel"] == "merge_splits":
            assert kernel["fused"] > 0, kernel


def test_kernels_compile(tmp_path):
    """Each in one way, for one architecture."""
    check(compile_cases(["--of-each", *SOME], tmp_path), 4)


@pytest.mark.long
def test_kernels_compile_in_every_dtype_and_width(tmp_path):
    """Of heads from 64 to 256 elements."""
    check(compile_cases(ALL, tmp_path), 9 * len(ALL))
