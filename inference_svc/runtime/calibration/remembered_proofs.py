"""What was proven of a model at an earlier start, so that the next one need not prove it again.

A proof runs a model some twenty times, a start that remembers one twice: the model is probed all
the same, and what the probe finds must be what was proven. So a model is served by a proof of
before only if everything that the proof depends on is as it was:

1. *by name* (`proof_name`): the fingerprint, what was asked for, where it runs, the versions of
   Python, torch and Transformers, the source of the model's own class, and all of our own source
   that runs a model;
2. *by what is found*: mode, layout (with what loading does to each component) and what each
   attention call sees.

Anything else is calibrated and proven anew. The file is the service's own, as its transcripts are.
"""

import hashlib
import inspect
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

import inference_svc.runtime
from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.calibration.calibration import PositionsChoice, calibrate, calibration_by
from inference_svc.runtime.calibration.sinks import find_sinks
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.packed_linear import pack_weights, packed_bytes, unpack_weights
from inference_svc.runtime.model.remembered_file import RememberedFile
from inference_svc.runtime.positions.recipes import Calibration, Mode, Positions

FORMAT = b"proofs 3"  # what is remembered in another format is not believed
MOST_PROOFS = 64  # some 500 bytes each


@dataclass(frozen=True)
class Proof:
    """What was proven of a model.

    Attributes:
        mode: that was proven.
        attention: name of the attention function that it runs with.
        positions: that were proven.
        notes: of the calibration.
        found: digest of the calibration.
        sink_tokens: first tokens that the model leans on.
        is_packed: whether that was with packed weights.
        is_one_by_one: see `Calibration`.
        rounding: likewise.
    """

    mode: Mode
    attention: str
    positions: Positions
    notes: tuple[str, ...]
    found: str
    sink_tokens: int
    is_packed: bool
    is_one_by_one: bool
    rounding: float


def calibrate_once(
    loaded: LoadedModel, positions: PositionsChoice, file: Path, *, packs_weights: bool = False
) -> tuple[Calibration, int, bool]:
    """Calibrate a model, by a proof of before if there is one.

    Args:
        loaded: the model.
        positions: see `calibrate`.
        file: where proofs are remembered.
        packs_weights: see `calibrate`.

    Returns:
        The calibration, the model's sink tokens, and whether it was proven before.

    Raises:
        UnsupportedModelError: as `calibrate` does.
    """
    remembered = RememberedFile(file, "proofs of calibrations", FORMAT, MOST_PROOFS)
    name = proof_name(loaded, positions, packs_weights=packs_weights)
    entry = remembered.find(name)
    if entry is not None:
        proof = Proof(**{**entry, "notes": tuple(entry["notes"])})
        again = _calibrate_by(loaded, proof)
        if again is not None:
            return again, proof.sink_tokens, True
    calibration = calibrate(loaded, positions, packs_weights=packs_weights)
    sink_tokens = find_sinks(loaded, calibration)
    proof = Proof(
        calibration.mode,
        loaded.model.config._attn_implementation,  # noqa: SLF001 - the only way to ask
        calibration.positions,
        calibration.notes,
        _digest(calibration),
        sink_tokens,
        packed_bytes(loaded.model) > 0,
        calibration.is_one_by_one,
        calibration.rounding,
    )
    remembered.remember({name: asdict(proof)})
    return calibration, sink_tokens, False


def proof_name(
    loaded: LoadedModel, positions: PositionsChoice, *, packs_weights: bool = False
) -> str:
    """Digest everything that a proof depends on, but for what probing finds."""
    is_cuda = loaded.device.type == "cuda"
    digest = hashlib.sha256()
    for fact in (
        loaded.fingerprint,
        loaded.dtype,
        loaded.context_window,
        positions,
        packs_weights,
        platform.machine(),
        torch.cuda.get_device_name(loaded.device) if is_cuda else loaded.device.type,
        torch.backends.cpu.get_cpu_capability(),
        platform.python_version(),
        torch.__version__,
        transformers.__version__,
    ):
        digest.update(f"{fact}\n".encode())
    ours = Path(inference_svc.runtime.__path__[0]).rglob("*.py")
    for source in (Path(inspect.getfile(type(loaded.model))), *sorted(ours)):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _calibrate_by(loaded: LoadedModel, proof: Proof) -> Calibration | None:
    """Calibrate a model as it was proven; None: another calibration is found than was proven.

    Then the model has the weights again that it came with.
    """
    if proof.is_packed:
        pack_weights(loaded.model)
    try:
        found = calibration_by(loaded, proof.mode, proof.attention, proof.positions, proof.notes)
        found = replace(found, is_one_by_one=proof.is_one_by_one, rounding=proof.rounding)
        if _digest(found) == proof.found:
            return found
    except UnsupportedModelError:
        pass
    unpack_weights(loaded.model)
    return None


def _digest(calibration: Calibration) -> str:
    """Digest what a calibration says of how a model is run and how its KV is stored."""
    facts = (
        calibration.mode,
        calibration.positions,
        calibration.layout.fingerprint,
        calibration.attention_calls,
        calibration.state_shapes,
        calibration.is_one_by_one,
        calibration.own_layers,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()
