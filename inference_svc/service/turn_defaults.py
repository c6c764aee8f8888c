"""What turns get that do not say: from the settings, checked against the model. Pure."""

from inference_svc.config import InferenceSettings
from inference_svc.core.compression.policies import check_compression, make_compression
from inference_svc.core.errors import InvalidCompressionError, UnsupportedModelError
from inference_svc.core.submission import ModelTraits, TurnDefaults
from inference_svc.core.truncation import KEPT_RATIO, RECOMPUTED_RATIO, OverflowPolicy


def turn_defaults(settings: InferenceSettings, model: ModelTraits) -> TurnDefaults:
    """What turns get that do not say.

    Args:
        settings: in effect.
        model: what it decides where the settings say "auto".

    Raises:
        UnsupportedModelError: the compression policy does not go with the model.
    """
    overflow, compression = settings.overflow, settings.compression
    policy = make_compression(compression.policy, compression.keep_ratio)
    try:
        if policy is not None:
            check_compression(policy, model.attention_mode)
    except InvalidCompressionError as error:
        raise UnsupportedModelError(error.message, error.remedy) from error
    usual_ratio = KEPT_RATIO if model.keeps_truncated else RECOMPUTED_RATIO
    return TurnDefaults(
        settings.scheduler.default_max_tokens,
        OverflowPolicy(
            overflow.policy,
            usual_ratio if overflow.ratio is None else overflow.ratio,
            model.sink_tokens if overflow.sink_tokens is None else overflow.sink_tokens,
            overflow.split_frames,
            overflow.drop_system,
        ),
        compression.policy,
        compression.keep_ratio,
        model,
    )
