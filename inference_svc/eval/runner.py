"""Runs one part of the eval: opens the model, measures, and describes the subject."""

import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from inference_svc.eval.compression_eval import measure_compression
from inference_svc.eval.edits_eval import measure_edits
from inference_svc.eval.eval_model import EvalModel, open_model
from inference_svc.eval.figures import EvalReport, Part, Subject
from inference_svc.eval.options import (
    CompressionOptions,
    EditsOptions,
    EvalChoice,
    Options,
    PerplexityOptions,
    RetrievalOptions,
)
from inference_svc.eval.perplexity import measure_perplexity
from inference_svc.eval.report import plot
from inference_svc.eval.retrieval import measure_retrieval
from inference_svc.eval.rotation import measure_rotation
from shared.measuring.plots import check_plot
from shared.measuring.workspace import cpu_name
from shared.version import __version__

LIBRARIES = ("torch", "transformers")


def run(options: Options, choice: EvalChoice) -> EvalReport:
    """Measure one part.

    Raises:
        ReportedError: the model, the text or an option cannot be used.
    """
    started = time.monotonic()
    found: Part
    if isinstance(options, PerplexityOptions):
        model = open_model(choice, options.methods)
        part, found = "perplexity", measure_perplexity(model, options, choice.on_progress)
    elif isinstance(options, RetrievalOptions):
        model = open_model(choice, options.methods)
        part, found = "retrieval", measure_retrieval(model, options, choice.on_progress)
    elif isinstance(options, CompressionOptions):
        if options.plot is not None:
            check_plot(options.plot)
        model = open_model(choice, ("ca",))
        part, found = "compression", measure_compression(model, options, choice.on_progress)
        if options.plot is not None:
            plot(found, model.loaded.name, options.plot)
    elif isinstance(options, EditsOptions):
        model = open_model(choice, ("ca",), packing="auto")
        part, found = "edits", measure_edits(model, options, choice.on_progress)
    else:
        model = open_model(choice, ("ca",))
        part, found = "rotation", measure_rotation(model, options)
    return EvalReport(
        part, tuple(sys.argv[1:]), time.monotonic() - started, subject_of(model), found
    )


def subject_of(model: EvalModel) -> Subject:
    """Describe the model and the machine."""
    loaded = model.loaded
    calibration = next(iter(model.calibrations.values()))
    return Subject(
        model=loaded.name,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        attention_mode=calibration.mode,
        sink_tokens=model.sink_tokens,
        num_weights=loaded.num_weights,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=str(loaded.device),
        threads=torch.get_num_threads(),
        cpu=cpu_name(),
        libraries={
            "inference_svc": __version__,
            **{name: version(name) for name in LIBRARIES},
        },
        date=datetime.now(UTC).date().isoformat(),
    )
