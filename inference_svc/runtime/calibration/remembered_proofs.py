"""Remembered proofs: calibrations that an earlier start has proven, and that are not proven again.

A proof runs a model some twenty times, a start with a remembered proof twice: the model is probed
again, and the result has to equal what was proven. So a remembered proof is used only if everything
that it depends on is unchanged:

1. *by name* (`proof_name`): the fingerprint, the requested settings, the machine, the versions of
   Python, torch and Transformers, the source of the model's own class, and all of our own source
   that runs a model;
2. *by result*: mode, layout (with what loading does to each component) and the keys that each
   attention call sees.

In all other cases the model is calibrated and proven again. The file belongs to the service, like
its transcripts.
"""

import hashlib
import inspect
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers

import inference_svc.runtime
from inference_svc.core.errors import UnsupportedModelError
from inference_svc.runtime.calibration.calibration import PositionsChoice, calibrate, calibration_by
from inference_svc.runtime.calibration.packing_choice import PackingName, usable_packings
from inference_svc.runtime.calibration.sinks import find_sinks
from inference_svc.runtime.model.model_loader import LoadedModel
from inference_svc.runtime.model.packed_linear import pack_weights, packing_of, unpack_weights
from inference_svc.runtime.model.packing import Packing
from inference_svc.runtime.model.remembered_file import RememberedFile
from inference_svc.runtime.positions.recipes import Calibration, Mode, Positions

FORMAT = b"proofs 4"  # files of another format are ignored
SOURCES = ("*.py", "*.cpp", "*.h")  # of ours that run a model
MOST_PROOFS = 64  # some 500 bytes each


@dataclass(frozen=True)
class Proof:
    """A proven calibration of a model.

    Attributes:
        mode: the proven mode.
        attention: name of the attention function that the mode runs with.
        positions: how positions are stored with KV.
        notes: the calibration's notes.
        found: digest of the calibration.
        sink_tokens: number of the model's attention sinks.
        packing: name of the packing that weights have; "": they are not packed.
        is_one_by_one: see `Calibration`.
        rounding: see `Calibration`.
    """

    mode: Mode
    attention: str
    positions: Positions
    notes: tuple[str, ...]
    found: str
    sink_tokens: int
    packing: str
    is_one_by_one: bool
    rounding: float


def calibrate_once(
    loaded: LoadedModel, positions: PositionsChoice, file: Path, packing: PackingName = "off"
) -> tuple[Calibration, int, bool]:
    """Calibrate a model, with a remembered proof if there is one.

    Args:
        loaded: the model.
        positions: see `calibrate`.
        file: the file of remembered proofs.
        packing: see `calibrate`.

    Returns:
        The calibration, the number of the model's attention sinks, and whether the proof was
        remembered.

    Raises:
        UnsupportedModelError, ConfigError: see `calibrate`.
    """
    packings = usable_packings(packing, loaded.device, loaded.dtype)
    remembered = RememberedFile(file, "proofs of calibrations", FORMAT, MOST_PROOFS)
    name = proof_name(loaded, positions, [usable.name for usable in packings])
    entry = remembered.find(name)
    if entry is not None:
        proof = Proof(**{**entry, "notes": tuple(entry["notes"])})
        again = _calibrate_by(loaded, proof, packings)
        if again is not None:
            return again, proof.sink_tokens, True
    calibration = calibrate(loaded, positions, packing)
    sink_tokens = find_sinks(loaded, calibration)
    proof = Proof(
        calibration.mode,
        loaded.model.config._attn_implementation,  # noqa: SLF001 - the only way to ask
        calibration.positions,
        calibration.notes,
        calibration_digest(calibration),
        sink_tokens,
        packing_of(loaded.model),
        calibration.is_one_by_one,
        calibration.rounding,
    )
    remembered.remember({name: asdict(proof)})
    return calibration, sink_tokens, False


def proof_name(
    loaded: LoadedModel, positions: PositionsChoice, packings: Sequence[str] = ()
) -> str:
    """Digest everything that a proof depends on, except the result of the probe."""
    is_cuda = loaded.device.type == "cuda"
    digest = hashlib.sha256()
    for fact in (
        loaded.fingerprint,
        loaded.dtype,
        loaded.context_window,
        positions,
        packings,
        platform.machine(),
        torch.cuda.get_device_name(loaded.device) if is_cuda else loaded.device.type,
        torch.backends.cpu.get_cpu_capability(),
        platform.python_version(),
        torch.__version__,
        transformers.__version__,
    ):
        digest.update(f"{fact}\n".encode())
    runtime = Path(inference_svc.runtime.__path__[0])
    ours = sorted(path for kind in SOURCES for path in runtime.rglob(kind))
    for source in (Path(inspect.getfile(type(loaded.model))), *ours):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _calibrate_by(
    loaded: LoadedModel, proof: Proof, packings: Sequence[Packing]
) -> Calibration | None:
    """Calibrate a model as it was proven; None: the result is not what was proven.

    In that case its weights are unpacked again.
    """
    for packing in packings:
        if packing.name == proof.packing:
            pack_weights(loaded.model, packing)
    try:
        found = calibration_by(loaded, proof.mode, proof.attention, proof.positions, proof.notes)
        found = replace(found, is_one_by_one=proof.is_one_by_one, rounding=proof.rounding)
        if calibration_digest(found) == proof.found:
            return found
    except UnsupportedModelError:
        pass
    unpack_weights(loaded.model)
    return None


def calibration_digest(calibration: Calibration) -> str:
    """Digest those parts of a calibration that decide how a model runs and how KV is stored."""
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
