from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "template_arguments", "beginning")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    BEGINNING_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_arguments: str
    beginning: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_arguments: _Optional[str] = ..., beginning: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "max_tokens", "logprobs", "ignore_eos", "frequency_penalty", "presence_penalty", "logit_bias", "stop_token_ids", "min_tokens", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    logprobs: int
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., logprobs: _Optional[int] = ..., ignore_eos: bool = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ...) -> None: ...

class Overflow(_message.Message):
    __slots__ = ("policy", "ratio", "sink_tokens", "split_frames", "drop_system")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    DROP_SYSTEM_FIELD_NUMBER: _ClassVar[int]
    policy: str
    ratio: float
    sink_tokens: int
    split_frames: bool
    drop_system: bool
    def __init__(self, policy: _Optional[str] = ..., ratio: _Optional[float] = ..., sink_tokens: _Optional[int] = ..., split_frames: bool = ..., drop_system: bool = ...) -> None: ...

class Compression(_message.Message):
    __slots__ = ("policy", "keep_ratio")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    KEEP_RATIO_FIELD_NUMBER: _ClassVar[int]
    policy: str
    keep_ratio: float
    def __init__(self, policy: _Optional[str] = ..., keep_ratio: _Optional[float] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("session_s", "prefix_s")
    SESSION_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_S_FIELD_NUMBER: _ClassVar[int]
    session_s: float
    prefix_s: float
    def __init__(self, session_s: _Optional[float] = ..., prefix_s: _Optional[float] = ...) -> None: ...

class SubmitTurnRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "text", "chat", "tokens", "sampling", "request_id", "expected_turn", "wait", "final", "priority", "deadline_s", "overflow", "compression", "special_tokens", "retention", "prediction")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TURN_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    text: str
    chat: ChatMessages
    tokens: TokenIds
    sampling: Sampling
    request_id: str
    expected_turn: int
    wait: bool
    final: bool
    priority: int
    deadline_s: float
    overflow: Overflow
    compression: Compression
    special_tokens: bool
    retention: Retention
    prediction: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatMessages, _Mapping]] = ..., tokens: _Optional[_Union[TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., request_id: _Optional[str] = ..., expected_turn: _Optional[int] = ..., wait: bool = ..., final: bool = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., overflow: _Optional[_Union[Overflow, _Mapping]] = ..., compression: _Optional[_Union[Compression, _Mapping]] = ..., special_tokens: bool = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., prediction: _Optional[str] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("session_id", "turn", "request_id", "queue_length", "replayed")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    turn: int
    request_id: str
    queue_length: int
    replayed: bool
    def __init__(self, session_id: _Optional[str] = ..., turn: _Optional[int] = ..., request_id: _Optional[str] = ..., queue_length: _Optional[int] = ..., replayed: bool = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("history_tokens", "reused_tokens", "queue_s", "new_tokens")
    HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    history_tokens: int
    reused_tokens: int
    queue_s: float
    new_tokens: int
    def __init__(self, history_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., new_tokens: _Optional[int] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("token_id", "text", "logprob", "top")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    text: str
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, token_id: _Optional[int] = ..., text: _Optional[str] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ...) -> None: ...

class CacheMiss(_message.Message):
    __slots__ = ("cause", "session_id", "turns", "token_index", "message_index", "lost_tokens", "lost_s")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    cause: str
    session_id: str
    turns: int
    token_index: int
    message_index: int
    lost_tokens: int
    lost_s: float
    def __init__(self, cause: _Optional[str] = ..., session_id: _Optional[str] = ..., turns: _Optional[int] = ..., token_index: _Optional[int] = ..., message_index: _Optional[int] = ..., lost_tokens: _Optional[int] = ..., lost_s: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("history_tokens", "reused_tokens", "recomputed_tokens", "new_tokens", "output_tokens", "tier_tokens", "queue_s", "load_s", "prefill_s", "ttft_s", "tpot_s", "total_s", "recompute_reason", "dropped_tokens", "preemptions", "stall_s", "compressed_tokens", "miss", "drafted_tokens", "accepted_tokens", "kept_tokens", "healed_tokens")
    class TierTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTE_REASON_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    COMPRESSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    history_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    new_tokens: int
    output_tokens: int
    tier_tokens: _containers.ScalarMap[str, int]
    queue_s: float
    load_s: float
    prefill_s: float
    ttft_s: float
    tpot_s: float
    total_s: float
    recompute_reason: str
    dropped_tokens: int
    preemptions: int
    stall_s: float
    compressed_tokens: int
    miss: CacheMiss
    drafted_tokens: int
    accepted_tokens: int
    kept_tokens: int
    healed_tokens: int
    def __init__(self, history_tokens: _Optional[int] = ..., reused_tokens: _Optional[int] = ..., recomputed_tokens: _Optional[int] = ..., new_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., tier_tokens: _Optional[_Mapping[str, int]] = ..., queue_s: _Optional[float] = ..., load_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., total_s: _Optional[float] = ..., recompute_reason: _Optional[str] = ..., dropped_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., stall_s: _Optional[float] = ..., compressed_tokens: _Optional[int] = ..., miss: _Optional[_Union[CacheMiss, _Mapping]] = ..., drafted_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ..., kept_tokens: _Optional[int] = ..., healed_tokens: _Optional[int] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "text", "usage", "turns", "stop_string")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    text: str
    usage: Usage
    turns: int
    stop_string: str
    def __init__(self, finish_reason: _Optional[str] = ..., text: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., turns: _Optional[int] = ..., stop_string: _Optional[str] = ...) -> None: ...

class TurnEvent(_message.Message):
    __slots__ = ("accepted", "started", "tokens", "finished")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    started: Started
    tokens: Tokens
    finished: Finished
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class CancelTurnRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "request_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    request_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., request_id: _Optional[str] = ...) -> None: ...

class CancelTurnResponse(_message.Message):
    __slots__ = ("cancelled",)
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    cancelled: int
    def __init__(self, cancelled: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "with_turns")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_TURNS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    with_turns: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., with_turns: bool = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Discarded(_message.Message):
    __slots__ = ("turn", "after_tokens", "ranges", "reason")
    TURN_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    turn: int
    after_tokens: int
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    reason: str
    def __init__(self, turn: _Optional[int] = ..., after_tokens: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class Graft(_message.Message):
    __slots__ = ("seam", "num_tokens", "session_id", "source_start", "healed_tokens")
    SEAM_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_START_FIELD_NUMBER: _ClassVar[int]
    HEALED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seam: int
    num_tokens: int
    session_id: str
    source_start: int
    healed_tokens: int
    def __init__(self, seam: _Optional[int] = ..., num_tokens: _Optional[int] = ..., session_id: _Optional[str] = ..., source_start: _Optional[int] = ..., healed_tokens: _Optional[int] = ...) -> None: ...

class TurnRecord(_message.Message):
    __slots__ = ("turn", "request_id", "input_ids", "output_ids", "text", "finish_reason", "usage", "created_unix_s", "stop_string", "grafts")
    TURN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    GRAFTS_FIELD_NUMBER: _ClassVar[int]
    turn: int
    request_id: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    finish_reason: str
    usage: Usage
    created_unix_s: float
    stop_string: str
    grafts: _containers.RepeatedCompositeFieldContainer[Graft]
    def __init__(self, turn: _Optional[int] = ..., request_id: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., finish_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., created_unix_s: _Optional[float] = ..., stop_string: _Optional[str] = ..., grafts: _Optional[_Iterable[_Union[Graft, _Mapping]]] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("tenant", "model", "session_id", "turns", "num_tokens", "busy", "ended", "turn_records", "context_tokens", "dropped_tokens", "context_ids", "discards")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TURN_RECORDS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    DISCARDS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    session_id: str
    turns: int
    num_tokens: int
    busy: bool
    ended: bool
    turn_records: _containers.RepeatedCompositeFieldContainer[TurnRecord]
    context_tokens: int
    dropped_tokens: int
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    discards: _containers.RepeatedCompositeFieldContainer[Discarded]
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., session_id: _Optional[str] = ..., turns: _Optional[int] = ..., num_tokens: _Optional[int] = ..., busy: bool = ..., ended: bool = ..., turn_records: _Optional[_Iterable[_Union[TurnRecord, _Mapping]]] = ..., context_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ..., context_ids: _Optional[_Iterable[int]] = ..., discards: _Optional[_Iterable[_Union[Discarded, _Mapping]]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExpectSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "awaited_tools", "superseded")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AWAITED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    awaited_tools: _containers.RepeatedScalarFieldContainer[str]
    superseded: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., awaited_tools: _Optional[_Iterable[str]] = ..., superseded: bool = ...) -> None: ...

class ExpectSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForkSessionRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "at_turn", "new_session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    AT_TURN_FIELD_NUMBER: _ClassVar[int]
    NEW_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    at_turn: int
    new_session_id: str
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., at_turn: _Optional[int] = ..., new_session_id: _Optional[str] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "ranges", "positions", "expected_turn", "expected_context_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TURN_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    positions: _containers.RepeatedScalarFieldContainer[int]
    expected_turn: int
    expected_context_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., positions: _Optional[_Iterable[int]] = ..., expected_turn: _Optional[int] = ..., expected_context_tokens: _Optional[int] = ...) -> None: ...

class DiscardResponse(_message.Message):
    __slots__ = ("context_tokens", "dropped_tokens")
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    context_tokens: int
    dropped_tokens: int
    def __init__(self, context_tokens: _Optional[int] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class ExplainMissRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "turn")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    turn: int
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., turn: _Optional[int] = ...) -> None: ...

class ExplainMissResponse(_message.Message):
    __slots__ = ("turn", "miss", "told", "common", "was", "now")
    TURN_FIELD_NUMBER: _ClassVar[int]
    MISS_FIELD_NUMBER: _ClassVar[int]
    TOLD_FIELD_NUMBER: _ClassVar[int]
    COMMON_FIELD_NUMBER: _ClassVar[int]
    WAS_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    turn: int
    miss: CacheMiss
    told: str
    common: str
    was: str
    now: str
    def __init__(self, turn: _Optional[int] = ..., miss: _Optional[_Union[CacheMiss, _Mapping]] = ..., told: _Optional[str] = ..., common: _Optional[str] = ..., was: _Optional[str] = ..., now: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "fingerprint", "architecture", "dtype", "device", "context_window", "vocab_size", "has_chat_template", "mode", "kvd_state", "attention_mode", "kv_bytes_per_token", "block_tokens", "num_layers", "running_turns", "waiting_turns", "version", "counters", "gauges", "positions", "overflow", "sink_tokens", "overflow_ratio", "window_bound", "embedding_size")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WINDOW_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    KVD_STATE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MODE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_TURNS_FIELD_NUMBER: _ClassVar[int]
    WAITING_TURNS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OVERFLOW_RATIO_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BOUND_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    architecture: str
    dtype: str
    device: str
    context_window: int
    vocab_size: int
    has_chat_template: bool
    mode: str
    kvd_state: str
    attention_mode: str
    kv_bytes_per_token: int
    block_tokens: int
    num_layers: int
    running_turns: int
    waiting_turns: int
    version: str
    counters: _containers.ScalarMap[str, int]
    gauges: _containers.ScalarMap[str, float]
    positions: str
    overflow: str
    sink_tokens: int
    overflow_ratio: float
    window_bound: str
    embedding_size: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., context_window: _Optional[int] = ..., vocab_size: _Optional[int] = ..., has_chat_template: bool = ..., mode: _Optional[str] = ..., kvd_state: _Optional[str] = ..., attention_mode: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ..., block_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., running_turns: _Optional[int] = ..., waiting_turns: _Optional[int] = ..., version: _Optional[str] = ..., counters: _Optional[_Mapping[str, int]] = ..., gauges: _Optional[_Mapping[str, float]] = ..., positions: _Optional[str] = ..., overflow: _Optional[str] = ..., sink_tokens: _Optional[int] = ..., overflow_ratio: _Optional[float] = ..., window_bound: _Optional[str] = ..., embedding_size: _Optional[int] = ...) -> None: ...
