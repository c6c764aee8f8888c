"""Piece compilers: what makes kernels of a graph's pieces, and keeps them for the next start.

The service has one, torch's own (inductor). Its import takes a second, which services that do not
compile are spared.
"""

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from inference_svc.runtime.compute.graph_pieces import Run

KERNEL_CACHE = "TORCHINDUCTOR_CACHE_DIR"  # the environment's variable


class PieceCompiler(Protocol):
    """Makes kernels of pieces."""

    def why_unusable(self, device: torch.device) -> str:
        """Return what it lacks to make kernels for a device; "": nothing."""

    def compile(self, piece: GraphModule, inputs: Sequence[Tensor]) -> Run:
        """Make kernels of a piece.

        Args:
            piece: a graph.
            inputs: its inputs without contents; sizes that vary are symbols.

        Returns:
            A function like it.
        """

    def to_bytes(self, run: Run) -> bytes:
        """Return what `from_bytes` makes a compiled piece of again, on this machine."""

    def from_bytes(self, kept: bytes) -> Run:
        """Undo `to_bytes`.

        Raises:
            Exception: it cannot; other versions or machines may have made it.
        """


class Inductor:
    """torch's own."""

    def why_unusable(self, device: torch.device) -> str:
        """See `PieceCompiler`."""
        has_compiler = device.type == "cuda" or any(map(shutil.which, ("g++", "clang++", "c++")))
        return "" if has_compiler else "there is no C++ compiler"

    def compile(self, piece: GraphModule, inputs: Sequence[Tensor]) -> Run:
        """See `PieceCompiler`; kernels are cached in the directory that KERNEL_CACHE names."""
        import torch._inductor as inductor
        from torch._inductor import config

        options = {
            "size_asserts": False,  # each call would check the shape of every argument
            # On a CPU, what calls the kernels is C++, too: it takes half of Python's time.
            "cpp_wrapper": all(tensor.device.type == "cpu" for tensor in inputs),
            # A part of the key under which kernels are cached on disk, unlike torch's own number.
            "cpp.threads": torch.get_num_threads(),
        }
        with config.patch(options), torch.inference_mode(mode=False), torch.no_grad():
            run: Run = inductor.standalone_compile(
                piece, list(inputs), dynamic_shapes="from_example_inputs"
            )
        return run

    def to_bytes(self, run: Any) -> bytes:
        """See `PieceCompiler`."""
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "piece"
            run.save(path=str(path), format="binary")
            return path.read_bytes()

    def from_bytes(self, kept: bytes) -> Run:
        """See `PieceCompiler`; a kernel that is not in the cache any more is made again."""
        directory = os.environ.get(KERNEL_CACHE)
        if directory is not None and not Path(directory).is_dir():
            raise FileNotFoundError(f"the kernels in {directory} were removed")
        from torch._inductor import config
        from torch._inductor.standalone_compile import CompiledArtifact

        # Else two test programs would run, to find out what this processor can do; they have run
        # when the piece was compiled.
        options = {"cpp.vec_isa_ok": True}
        with tempfile.NamedTemporaryFile() as file:
            file.write(kept)
            file.flush()
            with config.patch(options), torch.inference_mode(mode=False), torch.no_grad():
                run: Run = CompiledArtifact.load(path=file.name, format="binary")
        return run


INDUCTOR = Inductor()
