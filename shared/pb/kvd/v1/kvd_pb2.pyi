from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_SSD: _ClassVar[Tier]

class Lookup(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_UNSPECIFIED: _ClassVar[Lookup]
    LOOKUP_HIT: _ClassVar[Lookup]
    LOOKUP_PENDING: _ClassVar[Lookup]
    LOOKUP_MISS: _ClassVar[Lookup]

class Pin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PIN_NONE: _ClassVar[Pin]
    PIN_SOFT: _ClassVar[Pin]
    PIN_HARD: _ClassVar[Pin]

class TtlSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TTL_SOURCE_UNSPECIFIED: _ClassVar[TtlSource]
    TTL_SOURCE_DEFAULT: _ClassVar[TtlSource]
    TTL_SOURCE_TENANT: _ClassVar[TtlSource]
    TTL_SOURCE_SESSION: _ClassVar[TtlSource]

class SessionOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_ORDER_UNSPECIFIED: _ClassVar[SessionOrder]
    SESSION_ORDER_IDLE: _ClassVar[SessionOrder]
    SESSION_ORDER_BYTES: _ClassVar[SessionOrder]
    SESSION_ORDER_TOKENS: _ClassVar[SessionOrder]
    SESSION_ORDER_TTL: _ClassVar[SessionOrder]

class LeaseKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LEASE_KIND_UNSPECIFIED: _ClassVar[LeaseKind]
    LEASE_KIND_LOAD: _ClassVar[LeaseKind]
    LEASE_KIND_STORE: _ClassVar[LeaseKind]
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_DRAM: Tier
TIER_SSD: Tier
LOOKUP_UNSPECIFIED: Lookup
LOOKUP_HIT: Lookup
LOOKUP_PENDING: Lookup
LOOKUP_MISS: Lookup
PIN_NONE: Pin
PIN_SOFT: Pin
PIN_HARD: Pin
TTL_SOURCE_UNSPECIFIED: TtlSource
TTL_SOURCE_DEFAULT: TtlSource
TTL_SOURCE_TENANT: TtlSource
TTL_SOURCE_SESSION: TtlSource
SESSION_ORDER_UNSPECIFIED: SessionOrder
SESSION_ORDER_IDLE: SessionOrder
SESSION_ORDER_BYTES: SessionOrder
SESSION_ORDER_TOKENS: SessionOrder
SESSION_ORDER_TTL: SessionOrder
LEASE_KIND_UNSPECIFIED: LeaseKind
LEASE_KIND_LOAD: LeaseKind
LEASE_KIND_STORE: LeaseKind

class SessionKey(_message.Message):
    __slots__ = ("tenant", "model", "session_id")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    session_id: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., session_id: _Optional[str] = ...) -> None: ...

class Component(_message.Message):
    __slots__ = ("name", "shape", "dtype", "rotary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROTARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    rotary: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., rotary: _Optional[str] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("components", "window")
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    components: _containers.RepeatedCompositeFieldContainer[Component]
    window: int
    def __init__(self, components: _Optional[_Iterable[_Union[Component, _Mapping]]] = ..., window: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("model", "layers", "block_tokens", "position_mode", "tp_rank", "tp_size", "fingerprint", "state_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITION_MODE_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    block_tokens: int
    position_mode: str
    tp_rank: int
    tp_size: int
    fingerprint: str
    state_bytes: int
    def __init__(self, model: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ..., block_tokens: _Optional[int] = ..., position_mode: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ..., fingerprint: _Optional[str] = ..., state_bytes: _Optional[int] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("data_token", "layout", "held_leases", "engine_name", "instance", "version")
    DATA_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NAME_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    data_token: str
    layout: KVLayout
    held_leases: _containers.RepeatedScalarFieldContainer[int]
    engine_name: str
    instance: str
    version: str
    def __init__(self, data_token: _Optional[str] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., held_leases: _Optional[_Iterable[int]] = ..., engine_name: _Optional[str] = ..., instance: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class AttachEvent(_message.Message):
    __slots__ = ("attached", "draining")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    attached: Attached
    draining: Draining
    def __init__(self, attached: _Optional[_Union[Attached, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("engine_id", "arena_id", "slot_bytes", "num_slots", "confirmed_leases", "lost_leases", "kvd_version", "max_queue_jobs", "copiers", "retention", "expectations", "grafts", "states", "windows", "fetch_waits", "local_calls")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CONFIRMED_LEASES_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASES_FIELD_NUMBER: _ClassVar[int]
    KVD_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_JOBS_FIELD_NUMBER: _ClassVar[int]
    COPIERS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    EXPECTATIONS_FIELD_NUMBER: _ClassVar[int]
    GRAFTS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    FETCH_WAITS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_CALLS_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    arena_id: str
    slot_bytes: int
    num_slots: int
    confirmed_leases: _containers.RepeatedScalarFieldContainer[int]
    lost_leases: _containers.RepeatedScalarFieldContainer[int]
    kvd_version: str
    max_queue_jobs: int
    copiers: bool
    retention: bool
    expectations: bool
    grafts: bool
    states: bool
    windows: bool
    fetch_waits: bool
    local_calls: bool
    def __init__(self, engine_id: _Optional[int] = ..., arena_id: _Optional[str] = ..., slot_bytes: _Optional[int] = ..., num_slots: _Optional[int] = ..., confirmed_leases: _Optional[_Iterable[int]] = ..., lost_leases: _Optional[_Iterable[int]] = ..., kvd_version: _Optional[str] = ..., max_queue_jobs: _Optional[int] = ..., copiers: bool = ..., retention: bool = ..., expectations: bool = ..., grafts: bool = ..., states: bool = ..., windows: bool = ..., fetch_waits: bool = ..., local_calls: bool = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("deadline_s",)
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    deadline_s: float
    def __init__(self, deadline_s: _Optional[float] = ...) -> None: ...

class LoadSpan(_message.Message):
    __slots__ = ("slot_id", "start", "num_tokens", "token_offset", "tier", "generation")
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot_id: int
    start: int
    num_tokens: int
    token_offset: int
    tier: Tier
    generation: int
    def __init__(self, slot_id: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., token_offset: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., generation: _Optional[int] = ...) -> None: ...

class LoadSpans(_message.Message):
    __slots__ = ("slot_ids", "starts", "num_tokens", "generations", "tiers")
    SLOT_IDS_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    slot_ids: _containers.RepeatedScalarFieldContainer[int]
    starts: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, slot_ids: _Optional[_Iterable[int]] = ..., starts: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class GrantedState(_message.Message):
    __slots__ = ("position", "slot_ids", "generations")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    SLOT_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    position: int
    slot_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, position: _Optional[int] = ..., slot_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class GrantedWindow(_message.Message):
    __slots__ = ("token_offset", "num_tokens", "start", "slot_ids", "generations")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SLOT_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    num_tokens: int
    start: int
    slot_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., start: _Optional[int] = ..., slot_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class Lineage(_message.Message):
    __slots__ = ("digest", "clean_tokens")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLEAN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    clean_tokens: int
    def __init__(self, digest: _Optional[bytes] = ..., clean_tokens: _Optional[int] = ...) -> None: ...

class PrepareLoadRequest(_message.Message):
    __slots__ = ("engine_id", "session", "token_ids", "from_token", "deadline_s", "accept_pending", "dram_only", "lineage", "fetch_wait_s", "history_tokens", "span_columns")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_PENDING_FIELD_NUMBER: _ClassVar[int]
    DRAM_ONLY_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    FETCH_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPAN_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    token_ids: bytes
    from_token: int
    deadline_s: float
    accept_pending: bool
    dram_only: bool
    lineage: Lineage
    fetch_wait_s: float
    history_tokens: int
    span_columns: bool
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., from_token: _Optional[int] = ..., deadline_s: _Optional[float] = ..., accept_pending: bool = ..., dram_only: bool = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ..., fetch_wait_s: _Optional[float] = ..., history_tokens: _Optional[int] = ..., span_columns: bool = ...) -> None: ...

class PrepareLoadResponse(_message.Message):
    __slots__ = ("lookup", "lease_id", "spans", "end_token", "more", "miss_reason", "progress_index", "state", "windows", "fetch_waited_s", "columns")
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    FETCH_WAITED_S_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    lookup: Lookup
    lease_id: int
    spans: _containers.RepeatedCompositeFieldContainer[LoadSpan]
    end_token: int
    more: bool
    miss_reason: str
    progress_index: int
    state: GrantedState
    windows: _containers.RepeatedCompositeFieldContainer[GrantedWindow]
    fetch_waited_s: float
    columns: LoadSpans
    def __init__(self, lookup: _Optional[_Union[Lookup, str]] = ..., lease_id: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[LoadSpan, _Mapping]]] = ..., end_token: _Optional[int] = ..., more: bool = ..., miss_reason: _Optional[str] = ..., progress_index: _Optional[int] = ..., state: _Optional[_Union[GrantedState, _Mapping]] = ..., windows: _Optional[_Iterable[_Union[GrantedWindow, _Mapping]]] = ..., fetch_waited_s: _Optional[float] = ..., columns: _Optional[_Union[LoadSpans, _Mapping]] = ...) -> None: ...

class CompleteLoadRequest(_message.Message):
    __slots__ = ("engine_id", "lease_id")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    lease_id: int
    def __init__(self, engine_id: _Optional[int] = ..., lease_id: _Optional[int] = ...) -> None: ...

class CompleteLoadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrepareStoreRequest(_message.Message):
    __slots__ = ("engine_id", "session", "token_ids", "from_token", "deadline_s", "lineage", "load_ends", "block_columns")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FROM_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ENDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    token_ids: bytes
    from_token: int
    deadline_s: float
    lineage: Lineage
    load_ends: _containers.RepeatedScalarFieldContainer[int]
    block_columns: bool
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., from_token: _Optional[int] = ..., deadline_s: _Optional[float] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ..., load_ends: _Optional[_Iterable[int]] = ..., block_columns: bool = ...) -> None: ...

class StoreBlock(_message.Message):
    __slots__ = ("slot_id", "token_offset", "num_tokens", "generation")
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    slot_id: int
    token_offset: int
    num_tokens: int
    generation: int
    def __init__(self, slot_id: _Optional[int] = ..., token_offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class StoreBlocks(_message.Message):
    __slots__ = ("slot_ids", "token_offsets", "num_tokens", "generations")
    SLOT_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    slot_ids: _containers.RepeatedScalarFieldContainer[int]
    token_offsets: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot_ids: _Optional[_Iterable[int]] = ..., token_offsets: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class PrepareStoreResponse(_message.Message):
    __slots__ = ("lease_id", "blocks", "end_token", "more", "refused_reason", "states", "windows", "columns")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_REASON_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    blocks: _containers.RepeatedCompositeFieldContainer[StoreBlock]
    end_token: int
    more: bool
    refused_reason: str
    states: _containers.RepeatedCompositeFieldContainer[GrantedState]
    windows: _containers.RepeatedCompositeFieldContainer[GrantedWindow]
    columns: StoreBlocks
    def __init__(self, lease_id: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[StoreBlock, _Mapping]]] = ..., end_token: _Optional[int] = ..., more: bool = ..., refused_reason: _Optional[str] = ..., states: _Optional[_Iterable[_Union[GrantedState, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[GrantedWindow, _Mapping]]] = ..., columns: _Optional[_Union[StoreBlocks, _Mapping]] = ...) -> None: ...

class CompleteStoreRequest(_message.Message):
    __slots__ = ("engine_id", "lease_id", "success")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    lease_id: int
    success: bool
    def __init__(self, engine_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., success: bool = ...) -> None: ...

class CompleteStoreResponse(_message.Message):
    __slots__ = ("stored_tokens",)
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stored_tokens: int
    def __init__(self, stored_tokens: _Optional[int] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("engine_id", "session", "token_ids", "ranges", "lineage")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    token_ids: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    lineage: Lineage
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ...) -> None: ...

class DiscardResponse(_message.Message):
    __slots__ = ("kept_tokens",)
    KEPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kept_tokens: int
    def __init__(self, kept_tokens: _Optional[int] = ...) -> None: ...

class GraftRequest(_message.Message):
    __slots__ = ("engine_id", "session", "token_ids", "lineage", "source_session_id", "source_token_ids", "source_lineage", "source_range")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_LINEAGE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANGE_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    token_ids: bytes
    lineage: Lineage
    source_session_id: str
    source_token_ids: bytes
    source_lineage: Lineage
    source_range: TokenRange
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., token_ids: _Optional[bytes] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ..., source_session_id: _Optional[str] = ..., source_token_ids: _Optional[bytes] = ..., source_lineage: _Optional[_Union[Lineage, _Mapping]] = ..., source_range: _Optional[_Union[TokenRange, _Mapping]] = ...) -> None: ...

class GraftResponse(_message.Message):
    __slots__ = ("grafted_tokens",)
    GRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grafted_tokens: int
    def __init__(self, grafted_tokens: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session", "engine_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    engine_id: int
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., engine_id: _Optional[int] = ...) -> None: ...

class EndSessionRequest(_message.Message):
    __slots__ = ("engine_id", "session")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ...) -> None: ...

class EndSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetainSessionRequest(_message.Message):
    __slots__ = ("engine_id", "session", "retain_s", "prefix_token_ids")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    retain_s: float
    prefix_token_ids: bytes
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., retain_s: _Optional[float] = ..., prefix_token_ids: _Optional[bytes] = ...) -> None: ...

class RetainSessionResponse(_message.Message):
    __slots__ = ("retained_s",)
    RETAINED_S_FIELD_NUMBER: _ClassVar[int]
    retained_s: float
    def __init__(self, retained_s: _Optional[float] = ...) -> None: ...

class ExpectSessionRequest(_message.Message):
    __slots__ = ("engine_id", "session", "awaited_tools", "superseded")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AWAITED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    session: SessionKey
    awaited_tools: _containers.RepeatedScalarFieldContainer[str]
    superseded: bool
    def __init__(self, engine_id: _Optional[int] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., awaited_tools: _Optional[_Iterable[str]] = ..., superseded: bool = ...) -> None: ...

class ExpectSessionResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    def __init__(self, stored: bool = ...) -> None: ...

class CallFrame(_message.Message):
    __slots__ = ("number", "method", "request", "timeout_s", "metadata")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    number: int
    method: str
    request: bytes
    timeout_s: float
    metadata: _containers.ScalarMap[str, str]
    def __init__(self, number: _Optional[int] = ..., method: _Optional[str] = ..., request: _Optional[bytes] = ..., timeout_s: _Optional[float] = ..., metadata: _Optional[_Mapping[str, str]] = ...) -> None: ...

class AnswerFrame(_message.Message):
    __slots__ = ("number", "response", "code", "message", "status")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    number: int
    response: bytes
    code: int
    message: str
    status: bytes
    def __init__(self, number: _Optional[int] = ..., response: _Optional[bytes] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., status: _Optional[bytes] = ...) -> None: ...

class QueueJobs(_message.Message):
    __slots__ = ("numbers", "session_ids", "tenants", "priorities", "start_tags", "history_tokens", "digest", "checksum")
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    START_TAGS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    numbers: _containers.RepeatedScalarFieldContainer[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    tenants: _containers.RepeatedScalarFieldContainer[int]
    priorities: _containers.RepeatedScalarFieldContainer[int]
    start_tags: _containers.RepeatedScalarFieldContainer[float]
    history_tokens: _containers.RepeatedScalarFieldContainer[int]
    digest: int
    checksum: int
    def __init__(self, numbers: _Optional[_Iterable[int]] = ..., session_ids: _Optional[_Iterable[str]] = ..., tenants: _Optional[_Iterable[int]] = ..., priorities: _Optional[_Iterable[int]] = ..., start_tags: _Optional[_Iterable[float]] = ..., history_tokens: _Optional[_Iterable[int]] = ..., digest: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class QueueSnapshot(_message.Message):
    __slots__ = ("engine_id", "sequence", "base_sequence", "digest", "start_interval_s", "tenants", "waiting", "running", "left")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    BASE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    sequence: int
    base_sequence: int
    digest: int
    start_interval_s: float
    tenants: _containers.RepeatedScalarFieldContainer[str]
    waiting: QueueJobs
    running: QueueJobs
    left: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, engine_id: _Optional[int] = ..., sequence: _Optional[int] = ..., base_sequence: _Optional[int] = ..., digest: _Optional[int] = ..., start_interval_s: _Optional[float] = ..., tenants: _Optional[_Iterable[str]] = ..., waiting: _Optional[_Union[QueueJobs, _Mapping]] = ..., running: _Optional[_Union[QueueJobs, _Mapping]] = ..., left: _Optional[_Iterable[int]] = ...) -> None: ...

class QueueAck(_message.Message):
    __slots__ = ("sequence", "send_full")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SEND_FULL_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    send_full: bool
    def __init__(self, sequence: _Optional[int] = ..., send_full: bool = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session", "num_tokens", "num_blocks", "bytes", "dram_bytes", "ssd_bytes", "dirty_bytes", "shared_blocks", "pin", "leases", "idle_s", "ttl_s", "expires_in_s", "layout", "ended", "ttl_source", "num_spans", "waste_bytes", "retain_s", "retained_for_s", "awaited_tools", "superseded", "lost", "near_eviction")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TTL_SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPANS_FIELD_NUMBER: _ClassVar[int]
    WASTE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FOR_S_FIELD_NUMBER: _ClassVar[int]
    AWAITED_TOOLS_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    NEAR_EVICTION_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    num_tokens: int
    num_blocks: int
    bytes: int
    dram_bytes: int
    ssd_bytes: int
    dirty_bytes: int
    shared_blocks: int
    pin: Pin
    leases: int
    idle_s: float
    ttl_s: float
    expires_in_s: float
    layout: str
    ended: bool
    ttl_source: TtlSource
    num_spans: int
    waste_bytes: int
    retain_s: float
    retained_for_s: float
    awaited_tools: _containers.RepeatedScalarFieldContainer[str]
    superseded: bool
    lost: str
    near_eviction: bool
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., num_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., dirty_bytes: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., pin: _Optional[_Union[Pin, str]] = ..., leases: _Optional[int] = ..., idle_s: _Optional[float] = ..., ttl_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ..., layout: _Optional[str] = ..., ended: bool = ..., ttl_source: _Optional[_Union[TtlSource, str]] = ..., num_spans: _Optional[int] = ..., waste_bytes: _Optional[int] = ..., retain_s: _Optional[float] = ..., retained_for_s: _Optional[float] = ..., awaited_tools: _Optional[_Iterable[str]] = ..., superseded: bool = ..., lost: _Optional[str] = ..., near_eviction: bool = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("key", "token_offset", "start", "num_tokens", "tiers", "slot_id", "extent", "sessions", "dirty", "hashed", "verified")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SLOT_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    HASHED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    key: str
    token_offset: int
    start: int
    num_tokens: int
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    slot_id: int
    extent: int
    sessions: int
    dirty: bool
    hashed: bool
    verified: bool
    def __init__(self, key: _Optional[str] = ..., token_offset: _Optional[int] = ..., start: _Optional[int] = ..., num_tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., slot_id: _Optional[int] = ..., extent: _Optional[int] = ..., sessions: _Optional[int] = ..., dirty: bool = ..., hashed: bool = ..., verified: bool = ...) -> None: ...

class SessionFilter(_message.Message):
    __slots__ = ("tenant", "model", "tier", "idle_s", "larger_than_bytes", "pinned", "ended", "id_prefix")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LARGER_THAN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ID_PREFIX_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    model: str
    tier: Tier
    idle_s: float
    larger_than_bytes: int
    pinned: bool
    ended: bool
    id_prefix: str
    def __init__(self, tenant: _Optional[str] = ..., model: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., idle_s: _Optional[float] = ..., larger_than_bytes: _Optional[int] = ..., pinned: bool = ..., ended: bool = ..., id_prefix: _Optional[str] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("limit", "page_token", "filter", "order", "reverse")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    REVERSE_FIELD_NUMBER: _ClassVar[int]
    limit: int
    page_token: str
    filter: SessionFilter
    order: SessionOrder
    reverse: bool
    def __init__(self, limit: _Optional[int] = ..., page_token: _Optional[str] = ..., filter: _Optional[_Union[SessionFilter, _Mapping]] = ..., order: _Optional[_Union[SessionOrder, str]] = ..., reverse: bool = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next_page_token", "total", "unavailable_layouts")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    next_page_token: str
    total: int
    unavailable_layouts: int
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., total: _Optional[int] = ..., unavailable_layouts: _Optional[int] = ...) -> None: ...

class DescribeSessionRequest(_message.Message):
    __slots__ = ("session", "may_be_gone")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MAY_BE_GONE_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    may_be_gone: bool
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., may_be_gone: bool = ...) -> None: ...

class DescribeSessionResponse(_message.Message):
    __slots__ = ("info", "blocks", "history", "leases", "states", "windows")
    INFO_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    info: SessionInfo
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    history: _containers.RepeatedCompositeFieldContainer[SessionMove]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseInfo]
    states: _containers.RepeatedCompositeFieldContainer[StateInfo]
    windows: _containers.RepeatedCompositeFieldContainer[WindowInfo]
    def __init__(self, info: _Optional[_Union[SessionInfo, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ..., history: _Optional[_Iterable[_Union[SessionMove, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[LeaseInfo, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[StateInfo, _Mapping]]] = ..., windows: _Optional[_Iterable[_Union[WindowInfo, _Mapping]]] = ...) -> None: ...

class StateInfo(_message.Message):
    __slots__ = ("position", "bytes", "tiers", "sessions", "dirty", "hashed")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    HASHED_FIELD_NUMBER: _ClassVar[int]
    position: int
    bytes: int
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    sessions: int
    dirty: bool
    hashed: bool
    def __init__(self, position: _Optional[int] = ..., bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., sessions: _Optional[int] = ..., dirty: bool = ..., hashed: bool = ...) -> None: ...

class WindowInfo(_message.Message):
    __slots__ = ("token_offset", "num_tokens", "bytes", "tiers", "sessions", "dirty", "hashed")
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_FIELD_NUMBER: _ClassVar[int]
    HASHED_FIELD_NUMBER: _ClassVar[int]
    token_offset: int
    num_tokens: int
    bytes: int
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    sessions: int
    dirty: bool
    hashed: bool
    def __init__(self, token_offset: _Optional[int] = ..., num_tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., sessions: _Optional[int] = ..., dirty: bool = ..., hashed: bool = ...) -> None: ...

class SessionMove(_message.Message):
    __slots__ = ("kind", "age_s", "duration_s", "num_blocks", "num_tokens", "why")
    KIND_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    DURATION_S_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    kind: str
    age_s: float
    duration_s: float
    num_blocks: int
    num_tokens: int
    why: str
    def __init__(self, kind: _Optional[str] = ..., age_s: _Optional[float] = ..., duration_s: _Optional[float] = ..., num_blocks: _Optional[int] = ..., num_tokens: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("session", "all", "filter", "dry_run", "secure")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    SECURE_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    all: bool
    filter: SessionFilter
    dry_run: bool
    secure: bool
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., all: bool = ..., filter: _Optional[_Union[SessionFilter, _Mapping]] = ..., dry_run: bool = ..., secure: bool = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("sessions", "bytes", "skipped_leased", "erased_tenants", "unavailable_layouts")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_LEASED_FIELD_NUMBER: _ClassVar[int]
    ERASED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    bytes: int
    skipped_leased: _containers.RepeatedCompositeFieldContainer[SessionKey]
    erased_tenants: _containers.RepeatedScalarFieldContainer[str]
    unavailable_layouts: int
    def __init__(self, sessions: _Optional[int] = ..., bytes: _Optional[int] = ..., skipped_leased: _Optional[_Iterable[_Union[SessionKey, _Mapping]]] = ..., erased_tenants: _Optional[_Iterable[str]] = ..., unavailable_layouts: _Optional[int] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "soft")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SOFT_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    soft: bool
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., soft: bool = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetTtlRequest(_message.Message):
    __slots__ = ("session", "ttl_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    ttl_s: float
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class SetTtlResponse(_message.Message):
    __slots__ = ("expires_in_s",)
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    expires_in_s: float
    def __init__(self, expires_in_s: _Optional[float] = ...) -> None: ...

class LeaseInfo(_message.Message):
    __slots__ = ("lease_id", "kind", "session", "layout", "num_slots", "bytes", "age_s", "pending", "quarantined", "engine_id", "engine_name", "pid", "process_status")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NAME_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STATUS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    kind: LeaseKind
    session: SessionKey
    layout: str
    num_slots: int
    bytes: int
    age_s: float
    pending: bool
    quarantined: bool
    engine_id: int
    engine_name: str
    pid: int
    process_status: str
    def __init__(self, lease_id: _Optional[int] = ..., kind: _Optional[_Union[LeaseKind, str]] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., layout: _Optional[str] = ..., num_slots: _Optional[int] = ..., bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., pending: bool = ..., quarantined: bool = ..., engine_id: _Optional[int] = ..., engine_name: _Optional[str] = ..., pid: _Optional[int] = ..., process_status: _Optional[str] = ...) -> None: ...

class ListLeasesRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListLeasesResponse(_message.Message):
    __slots__ = ("leases",)
    LEASES_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseInfo]
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseInfo, _Mapping]]] = ...) -> None: ...

class KillHolderRequest(_message.Message):
    __slots__ = ("pid",)
    PID_FIELD_NUMBER: _ClassVar[int]
    pid: int
    def __init__(self, pid: _Optional[int] = ...) -> None: ...

class KillHolderResponse(_message.Message):
    __slots__ = ("num_leases", "num_slots", "gone")
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    num_leases: int
    num_slots: int
    gone: bool
    def __init__(self, num_leases: _Optional[int] = ..., num_slots: _Optional[int] = ..., gone: bool = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("repair", "model")
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    repair: bool
    model: str
    def __init__(self, repair: bool = ..., model: _Optional[str] = ...) -> None: ...

class TierVerified(_message.Message):
    __slots__ = ("num_blocks", "bytes", "num_corrupt")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRUPT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    bytes: int
    num_corrupt: int
    def __init__(self, num_blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., num_corrupt: _Optional[int] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("done", "layout", "dram", "ssd", "num_copies", "num_repaired", "num_lost", "num_errors")
    DONE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    DRAM_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_FIELD_NUMBER: _ClassVar[int]
    NUM_REPAIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    NUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    done: bool
    layout: str
    dram: TierVerified
    ssd: TierVerified
    num_copies: int
    num_repaired: int
    num_lost: int
    num_errors: int
    def __init__(self, done: bool = ..., layout: _Optional[str] = ..., dram: _Optional[_Union[TierVerified, _Mapping]] = ..., ssd: _Optional[_Union[TierVerified, _Mapping]] = ..., num_copies: _Optional[int] = ..., num_repaired: _Optional[int] = ..., num_lost: _Optional[int] = ..., num_errors: _Optional[int] = ...) -> None: ...

class ReopenLayoutRequest(_message.Message):
    __slots__ = ("layout", "accept_loss", "set_aside")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_LOSS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    layout: str
    accept_loss: bool
    set_aside: bool
    def __init__(self, layout: _Optional[str] = ..., accept_loss: bool = ..., set_aside: bool = ...) -> None: ...

class ReopenLayoutResponse(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReloadSettingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadSettingsResponse(_message.Message):
    __slots__ = ("applied", "needs_restart")
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    NEEDS_RESTART_FIELD_NUMBER: _ClassVar[int]
    applied: _containers.RepeatedScalarFieldContainer[str]
    needs_restart: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, applied: _Optional[_Iterable[str]] = ..., needs_restart: _Optional[_Iterable[str]] = ...) -> None: ...

class GetSettingsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Setting(_message.Message):
    __slots__ = ("key", "value", "source", "live", "json")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    source: str
    live: bool
    json: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ..., live: bool = ..., json: _Optional[str] = ...) -> None: ...

class GetSettingsResponse(_message.Message):
    __slots__ = ("settings", "file")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    settings: _containers.RepeatedCompositeFieldContainer[Setting]
    file: str
    def __init__(self, settings: _Optional[_Iterable[_Union[Setting, _Mapping]]] = ..., file: _Optional[str] = ...) -> None: ...

class ExportSessionRequest(_message.Message):
    __slots__ = ("session", "prefix", "chunk_bytes", "stream")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    prefix: bool
    chunk_bytes: int
    stream: bytes
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., prefix: bool = ..., chunk_bytes: _Optional[int] = ..., stream: _Optional[bytes] = ...) -> None: ...

class SessionFileHeader(_message.Message):
    __slots__ = ("session", "layout", "lineage", "kvd_version", "unix_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    KVD_VERSION_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    layout: KVLayout
    lineage: Lineage
    kvd_version: str
    unix_s: float
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., lineage: _Optional[_Union[Lineage, _Mapping]] = ..., kvd_version: _Optional[str] = ..., unix_s: _Optional[float] = ...) -> None: ...

class SessionFilePart(_message.Message):
    __slots__ = ("data", "chunk_end", "seal", "stream_bytes")
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHUNK_END_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    chunk_end: ChunkEnd
    seal: SessionSeal
    stream_bytes: int
    def __init__(self, data: _Optional[bytes] = ..., chunk_end: _Optional[_Union[ChunkEnd, _Mapping]] = ..., seal: _Optional[_Union[SessionSeal, _Mapping]] = ..., stream_bytes: _Optional[int] = ...) -> None: ...

class ChunkEnd(_message.Message):
    __slots__ = ("num_tokens",)
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    def __init__(self, num_tokens: _Optional[int] = ...) -> None: ...

class SessionSeal(_message.Message):
    __slots__ = ("master_key", "wrapped_key", "tag")
    MASTER_KEY_FIELD_NUMBER: _ClassVar[int]
    WRAPPED_KEY_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    master_key: str
    wrapped_key: bytes
    tag: bytes
    def __init__(self, master_key: _Optional[str] = ..., wrapped_key: _Optional[bytes] = ..., tag: _Optional[bytes] = ...) -> None: ...

class SessionManifest(_message.Message):
    __slots__ = ("session", "epoch", "owner", "owner_name", "written_by", "dropped", "header", "num_tokens", "chunks", "seal", "expires_after_s", "ttl_s", "pin", "retain_s", "seen_unix_s", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    OWNER_NAME_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BY_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    RETAIN_S_FIELD_NUMBER: _ClassVar[int]
    SEEN_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    epoch: int
    owner: str
    owner_name: str
    written_by: str
    dropped: bool
    header: bytes
    num_tokens: int
    chunks: _containers.RepeatedCompositeFieldContainer[RemoteChunk]
    seal: SessionSeal
    expires_after_s: float
    ttl_s: float
    pin: Pin
    retain_s: float
    seen_unix_s: float
    token_ids: RemoteChunk
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., epoch: _Optional[int] = ..., owner: _Optional[str] = ..., owner_name: _Optional[str] = ..., written_by: _Optional[str] = ..., dropped: bool = ..., header: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[RemoteChunk, _Mapping]]] = ..., seal: _Optional[_Union[SessionSeal, _Mapping]] = ..., expires_after_s: _Optional[float] = ..., ttl_s: _Optional[float] = ..., pin: _Optional[_Union[Pin, str]] = ..., retain_s: _Optional[float] = ..., seen_unix_s: _Optional[float] = ..., token_ids: _Optional[_Union[RemoteChunk, _Mapping]] = ...) -> None: ...

class RemoteChunk(_message.Message):
    __slots__ = ("name", "sha256", "num_bytes", "end_token", "blake3")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLAKE3_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: bytes
    num_bytes: int
    end_token: int
    blake3: bytes
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., end_token: _Optional[int] = ..., blake3: _Optional[bytes] = ...) -> None: ...

class ImportTarget(_message.Message):
    __slots__ = ("tenant", "session_id", "replace", "new_layout", "seal", "replace_up_to", "stream", "grow_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    NEW_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    REPLACE_UP_TO_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    GROW_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    replace: bool
    new_layout: bool
    seal: SessionSeal
    replace_up_to: int
    stream: bytes
    grow_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., replace: bool = ..., new_layout: bool = ..., seal: _Optional[_Union[SessionSeal, _Mapping]] = ..., replace_up_to: _Optional[int] = ..., stream: _Optional[bytes] = ..., grow_bytes: _Optional[int] = ...) -> None: ...

class ImportSessionRequest(_message.Message):
    __slots__ = ("target", "data", "stream_bytes")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    target: ImportTarget
    data: bytes
    stream_bytes: int
    def __init__(self, target: _Optional[_Union[ImportTarget, _Mapping]] = ..., data: _Optional[bytes] = ..., stream_bytes: _Optional[int] = ...) -> None: ...

class ImportSessionResponse(_message.Message):
    __slots__ = ("session", "num_tokens")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    num_tokens: int
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class AnswerWantedRequest(_message.Message):
    __slots__ = ("session", "coming")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    COMING_FIELD_NUMBER: _ClassVar[int]
    session: SessionKey
    coming: bool
    def __init__(self, session: _Optional[_Union[SessionKey, _Mapping]] = ..., coming: bool = ...) -> None: ...

class AnswerWantedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("tier", "capacity_bytes", "used_bytes", "num_blocks", "degraded", "degraded_reason", "physical_bytes", "surplus_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_REASON_FIELD_NUMBER: _ClassVar[int]
    PHYSICAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    SURPLUS_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: Tier
    capacity_bytes: int
    used_bytes: int
    num_blocks: int
    degraded: bool
    degraded_reason: str
    physical_bytes: int
    surplus_bytes: int
    def __init__(self, tier: _Optional[_Union[Tier, str]] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_blocks: _Optional[int] = ..., degraded: bool = ..., degraded_reason: _Optional[str] = ..., physical_bytes: _Optional[int] = ..., surplus_bytes: _Optional[int] = ...) -> None: ...

class ArenaStats(_message.Message):
    __slots__ = ("arena_id", "keep", "pages", "epoch", "adopted_blocks", "prefaulted")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADOPTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_FIELD_NUMBER: _ClassVar[int]
    arena_id: str
    keep: str
    pages: str
    epoch: int
    adopted_blocks: int
    prefaulted: bool
    def __init__(self, arena_id: _Optional[str] = ..., keep: _Optional[str] = ..., pages: _Optional[str] = ..., epoch: _Optional[int] = ..., adopted_blocks: _Optional[int] = ..., prefaulted: bool = ...) -> None: ...

class VolumeStats(_message.Message):
    __slots__ = ("direct", "buffered_reason", "admission")
    DIRECT_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_REASON_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_FIELD_NUMBER: _ClassVar[int]
    direct: bool
    buffered_reason: str
    admission: str
    def __init__(self, direct: bool = ..., buffered_reason: _Optional[str] = ..., admission: _Optional[str] = ...) -> None: ...

class TenantStats(_message.Message):
    __slots__ = ("tenant", "used_bytes", "has_quota", "quota_bytes", "num_sessions")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    HAS_QUOTA_FIELD_NUMBER: _ClassVar[int]
    QUOTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    used_bytes: int
    has_quota: bool
    quota_bytes: int
    num_sessions: int
    def __init__(self, tenant: _Optional[str] = ..., used_bytes: _Optional[int] = ..., has_quota: bool = ..., quota_bytes: _Optional[int] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class LayoutStats(_message.Message):
    __slots__ = ("layout", "model", "block_tokens", "block_bytes", "num_sessions", "tiers", "dirty_bytes", "leases", "counters", "orphan_leases", "quarantined_slots", "unverified_blocks", "soft_pins", "hard_pins", "arena", "volume", "tenants", "queue", "retained_sessions")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    DIRTY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    ORPHAN_LEASES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_SLOTS_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SOFT_PINS_FIELD_NUMBER: _ClassVar[int]
    HARD_PINS_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    VOLUME_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    RETAINED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    layout: str
    model: str
    block_tokens: int
    block_bytes: int
    num_sessions: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    dirty_bytes: int
    leases: int
    counters: _containers.ScalarMap[str, int]
    orphan_leases: int
    quarantined_slots: int
    unverified_blocks: int
    soft_pins: int
    hard_pins: int
    arena: ArenaStats
    volume: VolumeStats
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStats]
    queue: QueueStats
    retained_sessions: int
    def __init__(self, layout: _Optional[str] = ..., model: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., num_sessions: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., dirty_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., orphan_leases: _Optional[int] = ..., quarantined_slots: _Optional[int] = ..., unverified_blocks: _Optional[int] = ..., soft_pins: _Optional[int] = ..., hard_pins: _Optional[int] = ..., arena: _Optional[_Union[ArenaStats, _Mapping]] = ..., volume: _Optional[_Union[VolumeStats, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantStats, _Mapping]]] = ..., queue: _Optional[_Union[QueueStats, _Mapping]] = ..., retained_sessions: _Optional[int] = ...) -> None: ...

class QueueStats(_message.Message):
    __slots__ = ("waiting_jobs", "running_sessions", "prefetch_window", "eviction_window", "mean_session_bytes")
    WAITING_JOBS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_WINDOW_FIELD_NUMBER: _ClassVar[int]
    EVICTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MEAN_SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    waiting_jobs: int
    running_sessions: int
    prefetch_window: int
    eviction_window: int
    mean_session_bytes: int
    def __init__(self, waiting_jobs: _Optional[int] = ..., running_sessions: _Optional[int] = ..., prefetch_window: _Optional[int] = ..., eviction_window: _Optional[int] = ..., mean_session_bytes: _Optional[int] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("engine_id", "name", "layout", "pid", "command", "rss_bytes", "attached_s", "queue_jobs", "running_jobs", "version")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_JOBS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_JOBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    engine_id: int
    name: str
    layout: str
    pid: int
    command: str
    rss_bytes: int
    attached_s: float
    queue_jobs: int
    running_jobs: int
    version: str
    def __init__(self, engine_id: _Optional[int] = ..., name: _Optional[str] = ..., layout: _Optional[str] = ..., pid: _Optional[int] = ..., command: _Optional[str] = ..., rss_bytes: _Optional[int] = ..., attached_s: _Optional[float] = ..., queue_jobs: _Optional[int] = ..., running_jobs: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class ProcessStats(_message.Message):
    __slots__ = ("pid", "rss_bytes", "open_files", "threads", "cpu_s", "memory_available_bytes", "uptime_s", "dumps")
    PID_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_AVAILABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DUMPS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    rss_bytes: int
    open_files: int
    threads: int
    cpu_s: float
    memory_available_bytes: int
    uptime_s: float
    dumps: bool
    def __init__(self, pid: _Optional[int] = ..., rss_bytes: _Optional[int] = ..., open_files: _Optional[int] = ..., threads: _Optional[int] = ..., cpu_s: _Optional[float] = ..., memory_available_bytes: _Optional[int] = ..., uptime_s: _Optional[float] = ..., dumps: bool = ...) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("version", "layouts", "engines", "process", "verifying", "encryption", "unavailable", "server_id", "server_name")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    VERIFYING_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTION_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_NAME_FIELD_NUMBER: _ClassVar[int]
    version: str
    layouts: _containers.RepeatedCompositeFieldContainer[LayoutStats]
    engines: _containers.RepeatedCompositeFieldContainer[EngineInfo]
    process: ProcessStats
    verifying: bool
    encryption: EncryptionStats
    unavailable: _containers.RepeatedCompositeFieldContainer[UnavailableLayout]
    server_id: str
    server_name: str
    def __init__(self, version: _Optional[str] = ..., layouts: _Optional[_Iterable[_Union[LayoutStats, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineInfo, _Mapping]]] = ..., process: _Optional[_Union[ProcessStats, _Mapping]] = ..., verifying: bool = ..., encryption: _Optional[_Union[EncryptionStats, _Mapping]] = ..., unavailable: _Optional[_Iterable[_Union[UnavailableLayout, _Mapping]]] = ..., server_id: _Optional[str] = ..., server_name: _Optional[str] = ...) -> None: ...

class UnavailableLayout(_message.Message):
    __slots__ = ("layout", "why", "remedy", "since_s", "attempts", "next_attempt_s")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_ATTEMPT_S_FIELD_NUMBER: _ClassVar[int]
    layout: str
    why: str
    remedy: str
    since_s: float
    attempts: int
    next_attempt_s: float
    def __init__(self, layout: _Optional[str] = ..., why: _Optional[str] = ..., remedy: _Optional[str] = ..., since_s: _Optional[float] = ..., attempts: _Optional[int] = ..., next_attempt_s: _Optional[float] = ...) -> None: ...

class EncryptionStats(_message.Message):
    __slots__ = ("key", "encrypting", "may_have_plain", "tenants")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ENCRYPTING_FIELD_NUMBER: _ClassVar[int]
    MAY_HAVE_PLAIN_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    encrypting: bool
    may_have_plain: bool
    tenants: int
    def __init__(self, key: _Optional[str] = ..., encrypting: bool = ..., may_have_plain: bool = ..., tenants: _Optional[int] = ...) -> None: ...

class ListRecentTurnsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class RecentTurn(_message.Message):
    __slots__ = ("session", "turn", "arrived_s", "started_s", "ended_s", "wanted_tokens", "dram_tokens", "ssd_tokens", "stored_tokens", "asked", "ended")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_S_FIELD_NUMBER: _ClassVar[int]
    STARTED_S_FIELD_NUMBER: _ClassVar[int]
    ENDED_S_FIELD_NUMBER: _ClassVar[int]
    WANTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SSD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    session: int
    turn: int
    arrived_s: float
    started_s: float
    ended_s: float
    wanted_tokens: int
    dram_tokens: int
    ssd_tokens: int
    stored_tokens: int
    asked: bool
    ended: bool
    def __init__(self, session: _Optional[int] = ..., turn: _Optional[int] = ..., arrived_s: _Optional[float] = ..., started_s: _Optional[float] = ..., ended_s: _Optional[float] = ..., wanted_tokens: _Optional[int] = ..., dram_tokens: _Optional[int] = ..., ssd_tokens: _Optional[int] = ..., stored_tokens: _Optional[int] = ..., asked: bool = ..., ended: bool = ...) -> None: ...

class RecentTurns(_message.Message):
    __slots__ = ("layout", "model", "block_tokens", "block_bytes", "dram_bytes", "ssd_bytes", "policy", "ttl_s", "max_turns", "turns")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    SSD_BYTES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    layout: str
    model: str
    block_tokens: int
    block_bytes: int
    dram_bytes: int
    ssd_bytes: int
    policy: str
    ttl_s: float
    max_turns: int
    turns: _containers.RepeatedCompositeFieldContainer[RecentTurn]
    def __init__(self, layout: _Optional[str] = ..., model: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., dram_bytes: _Optional[int] = ..., ssd_bytes: _Optional[int] = ..., policy: _Optional[str] = ..., ttl_s: _Optional[float] = ..., max_turns: _Optional[int] = ..., turns: _Optional[_Iterable[_Union[RecentTurn, _Mapping]]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("tenant", "session_id", "names", "num_recent", "recent_only")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NUM_RECENT_FIELD_NUMBER: _ClassVar[int]
    RECENT_ONLY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    session_id: str
    names: _containers.RepeatedScalarFieldContainer[str]
    num_recent: int
    recent_only: bool
    def __init__(self, tenant: _Optional[str] = ..., session_id: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., num_recent: _Optional[int] = ..., recent_only: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("unix_s", "name", "session", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    unix_s: float
    name: str
    session: SessionKey
    fields: _containers.ScalarMap[str, str]
    def __init__(self, unix_s: _Optional[float] = ..., name: _Optional[str] = ..., session: _Optional[_Union[SessionKey, _Mapping]] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...
