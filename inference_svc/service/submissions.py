"""Makes the parts of a `Submission`, for gRPC and HTTP alike: fills defaults in, checks values.

gRPC and HTTP decode requests in their own forms. Sampling, overflow and compression come here as
mappings of the values that the client has set; all other values come from the settings. Each
function checks what it returns, as far as that is possible without the session.
"""

import secrets
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from inference_svc.config import InferenceSettings
from inference_svc.core.answers import SamplingParams
from inference_svc.core.chat import Message, Tool
from inference_svc.core.compression import CompressionPolicy, check_compression, make_compression
from inference_svc.core.errors import EmptyTurnError, InvalidCompressionError, UnsupportedModelError
from inference_svc.core.submission import ChatInput, ModelTraits, TurnDefaults
from inference_svc.core.template_arguments import Arguments
from inference_svc.core.truncation import KEPT_RATIO, RECOMPUTED_RATIO, OverflowPolicy

MAX_SEED = 2**63


def new_session_id() -> str:
    """Make an id for a session whose client does not name it."""
    return f"s-{uuid.uuid4().hex}"


def turn_defaults(settings: InferenceSettings, model: ModelTraits) -> TurnDefaults:
    """Make the defaults of turns from the settings, and check them against the model.

    Args:
        settings: the settings in effect.
        model: the model's properties, which decide where the settings say "auto".

    Raises:
        UnsupportedModelError: the model does not support the compression policy.
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
        max_tokens=settings.scheduler.default_max_tokens,
        overflow=OverflowPolicy(
            name=overflow.policy,
            ratio=usual_ratio if overflow.ratio is None else overflow.ratio,
            sink_tokens=model.sink_tokens if overflow.sink_tokens is None else overflow.sink_tokens,
            split_frames=overflow.split_frames,
            drop_system=overflow.drop_system,
        ),
        compression=compression.policy,
        keep_ratio=compression.keep_ratio,
        model=model,
    )


def chat_input(
    messages: Iterable[Message],
    tools: tuple[Tool, ...] = (),
    arguments: Arguments | None = None,
    beginning: str = "",
    *,
    is_prompt: bool = True,
) -> ChatInput:
    """Make an input of a turn's new messages; see `ChatInput`.

    Raises:
        EmptyTurnError: no message has content.
    """
    collected = tuple(messages)
    if not any(message.has_content for message in collected):
        raise empty_turn()
    return ChatInput(collected, tools, arguments or {}, beginning, is_prompt)


def empty_turn() -> EmptyTurnError:
    """Make the error of a turn without input."""
    return EmptyTurnError(
        "the turn is empty", "send a text, chat messages with content, or token ids"
    )


def fill_sampling(values: Mapping[str, Any], defaults: TurnDefaults) -> SamplingParams:
    """Complete a client's sampling parameters; a seed that it does not set is drawn.

    Args:
        values: the values that the client has set, by the names of SamplingParams.
        defaults: the defaults of turns.

    Raises:
        InvalidSamplingError: values are out of range; the message lists all of them.
    """
    usual = {"max_tokens": defaults.max_tokens, "seed": secrets.randbelow(MAX_SEED)}
    sampling = SamplingParams(**{**usual, **values})
    sampling.check()
    return sampling


def fill_overflow(values: Mapping[str, Any], defaults: TurnDefaults) -> OverflowPolicy:
    """Complete a client's overflow policy.

    Args:
        values: the values that the client has set, by the names of OverflowPolicy.
        defaults: the defaults of turns.

    Raises:
        InvalidTurnError: values are out of range; the message lists all of them.
    """
    policy = replace(defaults.overflow, **values)
    policy.check()
    return policy


def fill_compression(
    defaults: TurnDefaults, name: str = "", keep_ratio: float | None = None
) -> CompressionPolicy | None:
    """Complete a client's compression policy.

    Args:
        defaults: the defaults of turns.
        name: the policy that the client names; "": the default.
        keep_ratio: the part of the context that the policy keeps; None: the default.

    Returns:
        The policy; None: nothing is dropped after the turn.

    Raises:
        InvalidCompressionError: there is no such policy, or this model does not support it.
    """
    ratio = defaults.keep_ratio if keep_ratio is None else keep_ratio
    policy = make_compression(name or defaults.compression, ratio)
    if policy is not None:
        check_compression(policy, defaults.model.attention_mode)
    return policy
