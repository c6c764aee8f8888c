"""Settings of `inference-svc serve`: every key, its default and its bounds.

The environment prefix is INFERENCE: INFERENCE_SCHEDULER__MAX_RUNNING=4.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from inference_svc.context_settings import CompressionSettings, OverflowSettings, ReuseSettings
from inference_svc.core.kv_room import least_slots
from inference_svc.core.rates.rates import LoadPolicy
from inference_svc.core.template_arguments import parse_arguments_setting
from inference_svc.core.tenant_limits import TenantBounds
from inference_svc.installation import default_listen, default_state_dir
from inference_svc.openai_settings import OpenAISettings
from inference_svc.remote_settings import RemoteSettings
from shared.access.addresses import validate_sockets
from shared.access.settings import (
    ClientName,
    ClientSettings,
    Tenants,
    TlsSettings,
    check_distinct,
    check_guarded,
)
from shared.config.room import Demand, check_room
from shared.config.settings import LoadedSettings, load_settings
from shared.process.runtime_dir import MAX_MESSAGE_BYTES, default_runtime_dir
from shared.serving.observing_settings import MetricsSettings, ProcessSettings, TracingSettings
from shared.types.session_key import DEFAULT_TENANT
from shared.types.setting_types import (
    CountOrNone,
    Duration,
    RateOrNone,
    Section,
    TenantName,
    TenantWeights,
    TextList,
    to_list,
)

ENV_PREFIX = "INFERENCE"
# Variables of commands' options, which are no settings (inference_svc/cli/connection.py).
OTHER_VARIABLES = (
    *("INFERENCE_ADDRESS", "INFERENCE_TOKEN_FILE"),
    *("INFERENCE_TLS_CA_FILE", "INFERENCE_TLS_CERT_FILE", "INFERENCE_TLS_KEY_FILE"),
)
# Settings that a reload changes in a running service (shared/config/reload.py); all others take
# effect at the next start.
LIVE_KEYS: tuple[str, ...] = (
    "server.drain_s",
    "cache.load_policy",
    "reuse.edits",
    "overflow.policy",
    "overflow.ratio",
    "overflow.sink_tokens",
    "overflow.split_frames",
    "overflow.drop_system",
    "compression.policy",
    "compression.keep_ratio",
    "scheduler.default_max_tokens",
    "scheduler.tenant_weights",
    "limits",
    "tenants",
    "clients",
    "log.level",
)
AUTO = "auto"  # as an address or a directory: the supervisor's, or the system's default
MOST_TURNS = 65536
LEAST_TOKEN_BYTES = 64  # of a token's KV: even the smallest models have more
MAX_GRPC_BYTES = (1 << 31) - 1  # of a message: gRPC counts its bytes with a signed int32
MIN_RATE, MAX_RATE = 0.001, 1e12  # a minute: with others, waiting times are no usable numbers
LEAST_STEP_TOKENS = 16  # with fewer a step is all overhead
RoleList = Annotated[tuple[Literal["client", "reader"], ...], BeforeValidator(to_list)]
BOUNDS = tuple(known.name for known in fields(TenantBounds))


def _resolve_state_dir(value: object) -> object:
    """Replace "auto" by the default directory."""
    return default_state_dir() if value == AUTO else value


def _check_step_tokens(value: int) -> int:
    """Refuse steps that are too small; 0 means by the device."""
    if 0 < value < LEAST_STEP_TOKENS:
        raise ValueError(
            f"write at least {LEAST_STEP_TOKENS}, or 0 to have it chosen for the device"
        )
    return value


StepTokens = Annotated[int, Field(ge=0), AfterValidator(_check_step_tokens)]


class ModelSettings(Section):
    """Which model is served.

    Attributes:
        path: a Transformers model directory.
        dtype: number type of the weights; "auto": the one that they are stored in.
        device: PyTorch's name of the device that computes.
        threads: number of threads that compute; 0: as many as PyTorch chooses.
        attention: the attention back-end: "torch"'s own functions, or a kernel: in "triton" on a
            GPU, in "cpp" on a CPU. "auto": the kernel, if it is proven to give the same answers.
        graphs: whether decode steps are captured in graphs at start, and replayed. "auto": on a GPU
            with attention over pages, if they are proven to give the same answers.
        rotation: how loaded keys are embedded at their positions: by "torch", or by a kernel on
            their way to the sequence's memory: in "triton" on a GPU, in "cpp" on a CPU. "auto": by
            the kernel, if it is proven to give the same bits.
        compile: "step": torch's compiler makes kernels of the forward but for attention, proven to
            give the same answers. "auto": those of an earlier start are used. "off": none are.
        packed_weights: the kernel for whose products weights are reordered on a CPU: in "cpp", or
            "torch"'s own. "auto": the first of these with which the model is proven to give the
            same answers; for torch's, a small model's weights are kept in both orders.
        positions: how stored keys are positioned. "decoupled": embedded when they are loaded, so
            that a context that overflows keeps the KV that is left; "coupled": as they were cached;
            "auto": decoupled if the model allows it.
        pooling: how embeddings are made of the last layer's hidden states: that of the last token,
            the mean of all, or the mean in which later ones weigh more. "auto": as the files of
            sentence-transformers in the model's directory say; "none": the model makes none.
        chat_template_kwargs: arguments of the chat template for requests that name no others; in
            the environment as JSON.
    """

    path: Path | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str = "cpu"
    threads: int = Field(default=0, ge=0, le=1024)
    attention: Literal["auto", "torch", "triton", "cpp"] = "auto"
    graphs: Literal["auto", "off"] = "auto"
    rotation: Literal["auto", "torch", "cpp", "triton"] = "auto"
    compile: Literal["auto", "off", "step"] = "auto"
    packed_weights: Literal["auto", "cpp", "torch", "off"] = "auto"
    positions: Literal["auto", "decoupled", "coupled"] = "auto"
    pooling: Literal["auto", "none", "last", "mean", "weighted_mean"] = "auto"
    chat_template_kwargs: Annotated[Mapping[str, Any], BeforeValidator(parse_arguments_setting)] = (
        Field(default_factory=dict)
    )


class ServerSettings(Section):
    """Where and how clients are served.

    Attributes:
        listen: addresses, each "unix:/absolute/path", or "host:port" for clients with a token or a
            certificate; "auto": the default socket.
        state_dir: directory of transcripts and all other state that survives a restart; "auto": the
            default.
        max_message_bytes: bound of one gRPC message.
        drain_s: seconds that running turns may continue after SIGTERM.
        socket_tenants: tenants that callers on the Unix socket may name; the first is the default;
            "*": all tenants, for a gateway that authenticates its own clients.
        socket_group: group that may open the Unix socket; "": the group of the service.
    """

    listen: Annotated[TextList, Field(min_length=1)] = Field(
        default_factory=lambda: (default_listen(),)
    )
    state_dir: Annotated[Path, BeforeValidator(_resolve_state_dir)] = Field(
        default_factory=default_state_dir
    )
    max_message_bytes: int = Field(default=MAX_MESSAGE_BYTES, ge=65536, le=MAX_GRPC_BYTES)
    drain_s: Duration = Field(default=30.0, ge=0)
    socket_tenants: Tenants = (DEFAULT_TENANT,)
    socket_group: str = ""

    @field_validator("listen")
    @classmethod
    def _check_listen(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        addresses = [default_listen() if address == AUTO else address for address in value]
        return validate_sockets(addresses, also=", or auto")


class CacheSettings(Section):
    """How the KV of a session's history is stored and reused.

    Attributes:
        mode: "cached", or "recompute", which never calls kvd: the baseline.
        load_policy: "auto" loads where that costs the turn and those behind it less time than
            recomputing, by measured rates; "never" saves but does not load.
        residents: whether sessions keep their KV in memory after their turn while there is room.
        preload: "layers": a turn computes while its later layers are still being loaded; "none":
            it waits for all of them.
        read_buffer_layers: number of layers that are loaded before their turn computes, the others
            while it does; -1: as many as the measured rates require.
        saving: "async": while other turns compute; "sync": nothing is computed meanwhile; "off":
            nothing is stored.
        save_group_tokens: tokens of a turn under way that are stored together; at least a block's.
        mark_tokens: for models with a recurrent state, or with layers that attend to the last
            tokens only: tokens between positions of a long prompt at which a load can end, beside
            those where conversations turn; 0: only those.
        windows: whether layers that attend to the last tokens only store, load and hold no more
            than these; false: all tokens, which contexts need that lose scattered tokens. A
            compression policy implies false.
        transport: how KV is copied between kvd's memory and a GPU. "shm": by the service, from and
            to memory that it shares with kvd; "cuda_ipc": by kvd's copier, from and to memory of
            the GPU that it shares with the service, or as "shm" if there is no copier.
        kvd_runtime_dir: directory of kvd's sockets.
        deadline_s: most seconds that one load or one save may wait for kvd.
    """

    mode: Literal["cached", "recompute"] = "cached"
    load_policy: LoadPolicy = LoadPolicy.AUTO
    residents: bool = True
    preload: Literal["layers", "none"] = "layers"
    read_buffer_layers: int = Field(default=-1, ge=-1, le=65536)
    saving: Literal["async", "sync", "off"] = "async"
    save_group_tokens: int = Field(default=512, ge=1)
    mark_tokens: int = Field(default=8192, ge=0)
    windows: bool = True
    transport: Literal["shm", "cuda_ipc"] = "shm"
    kvd_runtime_dir: Path = Field(default_factory=default_runtime_dir)
    deadline_s: Duration = Field(default=10.0, gt=0, le=600)


class SchedulerSettings(Section):
    """Bounds of batches, of the queue and of the KV in memory.

    Attributes:
        max_running: bound of the turns in a batch. 0: by the device, 8 on a CPU and 64 on a GPU,
            fewer if their recurrent states would take too much of its memory.
        max_loading: bound of the turns that are loaded ahead of the batch. 0: by the device, 4 on a
            CPU and 8 on a GPU.
        max_turns: bound of the turns under way in all sessions together.
        max_turns_per_session: bound of the turns under way in one session.
        step_tokens: most prompt tokens of one step while nothing decodes. 0: by the device, 512 on
            a CPU and 4096 on a GPU.
        mixed_step_tokens: most prompt tokens of one step while anything decodes; more than
            step_tokens counts as step_tokens. 0: by the device, 128 on a CPU and 1024 on a GPU.
        kv_tokens: tokens whose KV fits in memory: of admitted turns, of resident sessions, and in
            the write ring; 0: as many as a share of the free memory holds. Without the ring's
            tokens it bounds the window. Where layers with a window hold the last tokens only, long
            sequences count for fewer tokens than they have.
        write_buffer_tokens: tokens of kv_tokens in the write ring, where computed KV waits until
            kvd has it; more than half of kv_tokens counts as half. 0: those of two steps and, for
            each running turn, of a group or a block, but at most a fifth of kv_tokens.
        working_kv: how KV lies in memory: "contiguous" for each turn, which a CPU reads fastest; or
            in "pages", which sessions with a common prefix share, and of which a turn gets more as
            it grows. "auto": pages on a GPU, contiguous on a CPU.
        page_tokens: tokens of a page; best a divisor of kvd's blocks.
        answer_tokens: tokens of an answer for which a turn gets room when it is admitted; a longer
            answer has to find more later.
        default_max_tokens: bound of an answer's tokens if the client sets none.
        draft_tokens: most tokens of a draft: tokens guessed to come next, from the session's own,
            and verified in one step; fewer, or none, where that does not pay. Answers stay the
            same. 0: no drafts.
        tenant_weights: a tenant's share of the service while several wait; 1 if not named.
        prefault: whether to touch the memory for kv_tokens at start, in the background.
    """

    max_running: int = Field(default=0, ge=0, le=1024)
    max_loading: int = Field(default=0, ge=0, le=1024)
    max_turns: int = Field(default=256, ge=1, le=MOST_TURNS)
    max_turns_per_session: int = Field(default=16, ge=1, le=MOST_TURNS)
    step_tokens: StepTokens = 0
    mixed_step_tokens: StepTokens = 0
    kv_tokens: int = Field(default=0, ge=0)
    write_buffer_tokens: int = Field(default=0, ge=0)
    working_kv: Literal["auto", "contiguous", "pages"] = "auto"
    page_tokens: int = Field(default=16, ge=1, le=4096)
    answer_tokens: int = Field(default=256, ge=1)
    default_max_tokens: int = Field(default=256, ge=1)
    draft_tokens: int = Field(default=16, ge=0, le=64)
    tenant_weights: TenantWeights = Field(default_factory=dict)
    prefault: bool = True


class TenantSettings(Section):
    """One tenant's limits in place of the defaults; a key that is not set keeps the default.

    Attributes:
        turns_per_minute: rate of the turns that begin.
        tokens_per_minute: rate of the tokens that are computed: of prompts, unless they are in the
            cache, and of answers.
        max_turns: bound of the turns under way at once, waiting ones included.
        max_sessions: bound of the sessions that are kept.
    """

    turns_per_minute: RateOrNone = Field(default=None, ge=MIN_RATE, le=MAX_RATE)
    tokens_per_minute: RateOrNone = Field(default=None, ge=MIN_RATE, le=MAX_RATE)
    max_turns: CountOrNone = Field(default=None, ge=0)
    max_sessions: CountOrNone = Field(default=None, ge=0)


class LimitSettings(TenantSettings):
    """Limits of each tenant that has none of its own, and of each client.

    Attributes:
        max_streams_per_client: bound of the turns that one client follows at once.
    """

    max_streams_per_client: int = Field(default=1024, ge=1)


class InferenceClientSettings(ClientSettings):
    """One client that is identified by a token or a certificate."""

    roles: RoleList = ("client",)


class LogSettings(Section):
    """The level and format of the log, which goes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"

    @property
    def json_lines(self) -> bool | None:
        """The format as `configure_logging` takes it; None: it chooses."""
        return None if self.format == "auto" else self.format == "json"


class InferenceSettings(Section):
    """All settings of the service, by section."""

    model: ModelSettings = ModelSettings()
    server: ServerSettings = Field(default_factory=ServerSettings)
    cache: CacheSettings = Field(default_factory=CacheSettings)
    reuse: ReuseSettings = ReuseSettings()
    overflow: OverflowSettings = OverflowSettings()
    compression: CompressionSettings = CompressionSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    limits: LimitSettings = LimitSettings()
    tenants: Mapping[TenantName, TenantSettings] = Field(default_factory=dict)
    clients: Annotated[
        Mapping[ClientName, InferenceClientSettings], AfterValidator(check_distinct)
    ] = Field(default_factory=dict)
    tls: TlsSettings = TlsSettings()
    openai: OpenAISettings = OpenAISettings()
    remote: RemoteSettings = RemoteSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    process: ProcessSettings = ProcessSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _check_window_room(self) -> "InferenceSettings":
        saves = self.cache.mode == "cached" and self.cache.saving != "off"
        kv_tokens, least = self.scheduler.kv_tokens, least_slots(saves=saves)
        if 0 < kv_tokens < least:
            ring = " beside the write ring" if saves else ""
            raise ValueError(
                f"scheduler.kv_tokens = {kv_tokens} leaves no room for a turn{ring}: write at "
                f"least {least}, or 0 to have it chosen from the free memory"
            )
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> "InferenceSettings":
        if self.cache.transport == "cuda_ipc" and not self.model.device.startswith("cuda"):
            raise ValueError(
                'cache.transport = "cuda_ipc" does not work with model.device = '
                f'"{self.model.device}": write "shm", or compute on a GPU'
            )
        return self

    def tenant_bounds(self) -> tuple[TenantBounds, dict[str, TenantBounds]]:
        """Return the limits of tenants without their own, and those of the others by name."""
        default = TenantBounds(**{name: getattr(self.limits, name) for name in BOUNDS})
        named = {
            name: replace(default, **limits.model_dump(include=limits.model_fields_set))
            for name, limits in self.tenants.items()
        }
        return default, named


def load_inference_settings(
    toml_path: Path | None, flags: Mapping[str, object]
) -> LoadedSettings[InferenceSettings]:
    """Read the settings from file, environment and flags, and check them.

    Args:
        toml_path: the settings file; None: there is none.
        flags: values of the command's flags, by key.

    Raises:
        InvalidSettingsError: settings are invalid; the message lists all problems.
        UnguardedError: an address would be open to clients without credentials.
    """
    loaded = load_settings(
        InferenceSettings, toml_path, ENV_PREFIX, flags, other_variables=OTHER_VARIABLES
    )
    settings = loaded.settings
    check_room(
        (
            Demand(
                "scheduler.kv_tokens (at 64 bytes each, the least there is)",
                settings.scheduler.kv_tokens * LEAST_TOKEN_BYTES,
            ),
            Demand("openai.max_body_bytes", settings.openai.max_body_bytes),
        )
    )
    check_guarded(settings.server.listen, settings.tls, settings.clients)
    settings.openai.check_guarded(settings.tls, settings.clients)
    settings.metrics.check_guarded(settings.tls, settings.clients)
    return loaded
