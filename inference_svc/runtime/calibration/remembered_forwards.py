"""Remembered forwards: compiled forwards that an earlier start has made and proven.

Tracing a forward and compiling its pieces takes seconds, and minutes where no kernels are cached.
What comes of it is little: kernels, which call is made with which values, and the names of weights.
That is kept in a file of the service, and used if everything is unchanged on which it depends
(`_entry_name`). A few steps are still compared with the forward as it is (`compile_choice.py`).
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inference_svc.runtime.calibration.kernels import reason_of
from inference_svc.runtime.calibration.remembered_proofs import calibration_digest, proof_name
from inference_svc.runtime.compute.compiled_forward import CompiledForward, CompiledGraph
from inference_svc.runtime.compute.graph_pieces import Operation, Run
from inference_svc.runtime.compute.graph_program import Call, GraphProgram
from inference_svc.runtime.compute.joined_products import JoinedWeights, join_weights
from inference_svc.runtime.compute.piece_compiler import PieceCompiler
from inference_svc.runtime.cpu.native_library import processor_features
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.packed_linear import packing_of
from inference_svc.runtime.model.remembered_file import RememberedFile
from inference_svc.runtime.positions.recipes import Calibration
from shared.process.log import get_logger

FORMAT = b"forwards 3"  # files of another format are ignored
MOST_FORWARDS = 4  # of 2 MiB each
WEIGHTS = "weights"  # the key of a weight's names

log = get_logger(__name__)


class UnnamedError(Exception):
    """A forward calls or takes something that has no name; the message says what."""


class RememberedForwards:
    """The compiled forwards in a file, of this service's models."""

    def __init__(self, file: Path, compiler: PieceCompiler) -> None:
        """Read the file."""
        self._file = RememberedFile(file, "compiled forwards", FORMAT, MOST_FORWARDS)
        self._compiler = compiler

    def find(self, loaded: LoadedModel, calibration: Calibration) -> CompiledForward | None:
        """Return a model's compiled forward; None: there is none.

        Raises:
            Exception: it cannot be loaded.
        """
        entry = self._file.find(_entry_name(loaded, calibration))
        return None if entry is None else self._decode(entry, loaded.model)

    def remember(
        self, loaded: LoadedModel, calibration: Calibration, compiled: CompiledForward
    ) -> None:
        """Keep a model's compiled forward for later starts, if it can be."""
        try:
            entry = self._encode(compiled, loaded.model)
        except Exception as error:  # noqa: BLE001 - compilers may raise anything
            log.warning("forward_not_remembered", reason=reason_of(error))
            return
        self._file.remember({_entry_name(loaded, calibration): entry})

    def _encode(self, compiled: CompiledForward, model: nn.Module) -> dict[str, Any]:
        pieces = {id(run): number for number, run in enumerate(compiled.pieces)}
        names = {id(weight): [name] for name, weight in _weights_of(model).items()}
        for weights in compiled.joined:
            names[id(weights.joined)] = [names[id(part)][0] for part in weights.parts]
        return {
            "pieces": [
                base64.b64encode(self._compiler.to_bytes(run)).decode() for run in compiled.pieces
            ],
            "graphs": [
                {
                    "tokens": [graph.tokens.start, graph.tokens.stop],
                    "rows": [graph.rows.start, graph.rows.stop],
                    "constants": [
                        _encode_constant(constant, names) for constant in graph.program.constants
                    ],
                    "calls": [
                        [_encode_run(call.run, pieces), *call[1:]] for call in graph.program.calls
                    ],
                    "num_values": graph.program.num_values,
                    "answer": graph.program.answer,
                }
                for graph in compiled.graphs
            ],
        }

    def _decode(self, entry: Mapping[str, Any], model: nn.Module) -> CompiledForward:
        pieces = [self._compiler.from_bytes(base64.b64decode(kept)) for kept in entry["pieces"]]
        weights = _KnownWeights(model)
        graphs = []
        for graph in entry["graphs"]:
            constants = [weights.constant(constant) for constant in graph["constants"]]
            calls = [
                Call(
                    pieces[run] if isinstance(run, int) else Operation(_operator(run)),
                    tuple(arguments),
                    (first, end),
                    tuple(last_read),
                )
                for run, arguments, (first, end), last_read in graph["calls"]
            ]
            program = GraphProgram(constants, calls, graph["num_values"], graph["answer"])
            tokens, rows = (range(*graph[kind]) for kind in ("tokens", "rows"))
            graphs.append(CompiledGraph(tokens, rows, program))
        return CompiledForward(graphs, pieces, list(weights.joined.values()))


class _KnownWeights:
    """The weights of a model, by their names."""

    def __init__(self, model: nn.Module) -> None:
        self._weights = _weights_of(model)
        self.joined: dict[tuple[str, ...], JoinedWeights] = {}

    def constant(self, encoded: Any) -> Any:
        """Undo `_encode_constant`; weights that several graphs take are joined once."""
        if not isinstance(encoded, dict):
            return encoded
        names = tuple(encoded[WEIGHTS])
        if len(names) == 1:
            return self._weights[names[0]]
        if names not in self.joined:
            self.joined[names] = join_weights([self._weights[name] for name in names])
        return self.joined[names].joined


def _entry_name(loaded: LoadedModel, calibration: Calibration) -> str:
    """Digest everything that a compiled forward depends on."""
    facts = (
        proof_name(loaded, "auto", [packing_of(loaded.model)]),
        calibration_digest(calibration),
        torch.get_num_threads(),
        *processor_features(),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _encode_run(run: Run, pieces: Mapping[int, int]) -> int | str:
    """Return the number of a piece, or the name of an operation."""
    if isinstance(run, Operation):
        return str(run.target)  # "namespace.name.overload"
    return pieces[id(run)]


def _operator(name: str) -> Any:
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _encode_constant(constant: Any, names: Mapping[int, Sequence[str]]) -> Any:
    """Return what is the same in every run in JSON: the names of a weight, or a plain value.

    Raises:
        UnnamedError: it is another tensor, or nothing that JSON has.
    """
    if isinstance(constant, Tensor):
        if id(constant) not in names:
            raise UnnamedError(f"a tensor of {list(constant.shape)} is none of the model's")
        return {WEIGHTS: names[id(constant)]}
    if isinstance(constant, list | tuple):
        return [_encode_constant(one, names) for one in constant]
    is_plain = constant is None or isinstance(constant, bool | int | str)
    if is_plain or (isinstance(constant, float) and math.isfinite(constant)):
        return constant
    raise UnnamedError(f"an argument is a {type(constant).__name__}")
