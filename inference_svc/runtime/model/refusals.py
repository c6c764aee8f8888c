"""Refusals of models at the start: each is an UnsupportedModelError with its own `reason`."""

from inference_svc.core.errors import UnsupportedModelError

REMEDY = "serve a decoder-only model that docs/models.md lists, such as Llama, Qwen or Mistral"


class ModelEncoderError(UnsupportedModelError):
    """The model is an encoder: tokens see later ones, so KV changes with every new token."""

    reason = "model_encoder"


class ModelUncachedError(UnsupportedModelError):
    """The model passes neither keys and values nor a state to a cache."""

    reason = "model_uncached"


class ModelRecurrentError(UnsupportedModelError):
    """The model keeps more of a sequence than KV per token and a state of fixed size."""

    reason = "model_recurrent"


class ModelModeMissingError(UnsupportedModelError):
    """The model cannot be run in the mode that was tried."""

    reason = "model_mode_missing"


class NotDecoupledError(UnsupportedModelError):
    """KV of the first layer depends on the token's position; `positions` was set to decoupled."""

    reason = "model_positions_coupled"


class RopeVariesError(UnsupportedModelError):
    """Rotary frequencies change with the length of the sequence, and cannot be frozen."""

    reason = "rope_depends_on_length"


class CalibrationMismatchError(UnsupportedModelError):
    """Our logits differ from the stock model's."""

    reason = "calibration_mismatch"


# Refusals that no other mode can change.
FINAL = (ModelUncachedError, ModelRecurrentError, RopeVariesError)
