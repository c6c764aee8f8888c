"""Why a model is refused at the start; each is an UnsupportedModelError with its own `reason`."""

from inference_svc.core.errors import UnsupportedModelError

REMEDY = "serve a decoder-only model with rotary positions, such as Llama, Qwen or Mistral"


class ModelNotRotaryError(UnsupportedModelError):
    """Keys depend on absolute positions that were added before the attention."""

    reason = "model_not_rotary"


class ModelRecurrentError(UnsupportedModelError):
    """The model keeps a recurrent state, which has no per-token rows to store."""

    reason = "model_recurrent"


class ModelModeMissingError(UnsupportedModelError):
    """The model needs another way of attending, which does not exist yet."""

    reason = "model_mode_missing"


class RopeVariesError(UnsupportedModelError):
    """Rotary frequencies change with the length of the sequence (dynamic NTK, longrope)."""

    reason = "rope_depends_on_length"


class CalibrationMismatchError(UnsupportedModelError):
    """Our logits differ from the stock model's."""

    reason = "calibration_mismatch"
