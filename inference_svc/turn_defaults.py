"""What turns get that do not say: from the settings, checked against the model. Pure."""

from inference_svc.config import InferenceSettings
from inference_svc.core.compression.registry import check_compression, make_compression
from inference_svc.core.errors import InvalidCompressionError, UnsupportedModelError
from inference_svc.core.submission import TurnDefaults
from inference_svc.core.truncation import OverflowPolicy


def turn_defaults(
    settings: InferenceSettings, attention_mode: str, model_sinks: int
) -> TurnDefaults:
    """What turns get that do not say.

    Args:
        settings: in effect.
        attention_mode: the model's calibration mode.
        model_sinks: how many first tokens the model leans on.

    Raises:
        UnsupportedModelError: the compression policy does not go with the model.
    """
    overflow, compression = settings.overflow, settings.compression
    policy = make_compression(compression.policy, compression.keep_ratio)
    try:
        if policy is not None:
            check_compression(policy, attention_mode)
    except InvalidCompressionError as error:
        raise UnsupportedModelError(error.message, error.remedy) from error
    return TurnDefaults(
        settings.scheduler.default_max_tokens,
        OverflowPolicy(
            overflow.policy,
            overflow.ratio,
            model_sinks if overflow.sink_tokens is None else overflow.sink_tokens,
            overflow.split_frames,
            overflow.drop_system,
        ),
        compression.policy,
        compression.keep_ratio,
        attention_mode,
        model_sinks,
    )
