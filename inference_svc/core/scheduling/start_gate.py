"""When a request may join the batch although its history is still being loaded.

Early enough that loading hides behind computing, late enough that no layer waits: a forward that
waits holds up everybody in the batch. Layer *l*'s attention needs layer *l* of the history. Loading
proceeds layer by layer while the forward computes; if a layer loads slower than it is computed, the
load must be ahead when the forward starts: by the paper's read buffer, S_buf, which follows from
measured rates (`buffer_layers`). The gate opens once so much is loaded; the layer under way counts
by the time that has passed. While rates are unknown, one loaded layer is enough.

Nobody is held for ever: a forward's own wait for a layer has a deadline and this gate has not, so
a load that stands still is let through, to fail there.

Invariant: what is not certain, because its load may still fail, is never kept as a resident.

*Source:* CachedAttention §3.2.1, fig. 7.
"""

from dataclasses import dataclass

from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request
from shared.types.units import NS_PER_S


def buffer_layers(num_layers: int, load_layer_s: float, compute_layer_s: float) -> float:
    """Return how many layers are to be loaded when a forward starts: the read buffer, S_buf.

    With fewer a layer waits, with more the forward starts later than it could. Between 1 and
    num_layers; not rounded: of a layer that is half loaded half the time has passed.

    Layer l is needed l · compute_layer_s after the start. If S layers are there then, it arrives
    (l + 1 - S) · load_layer_s after it; the last one is in time from the S returned here on, and
    so is each before it. Where loading is the faster, only the first layer is waited for.

    The paper's S_buf = B · (T_load · L_hist - T_pref · L_new) is, with the bandwidth B of one layer
    each load_layer_s, num_layers · (1 - compute_layer_s / load_layer_s) layers. It hides loading
    behind all layers' computing, its own included: the last layer would come when it has been
    computed. That is one layer's computing too late, and one load if loading is the faster.

    Args:
        num_layers: number of the model's layers.
        load_layer_s: seconds to load one layer of the history.
        compute_layer_s: seconds to compute one layer of the forward.
    """
    if load_layer_s <= compute_layer_s:
        return 1.0
    return num_layers - (num_layers - 1) * compute_layer_s / load_layer_s


HBM = "hbm"  # the tier of KV in the engine's own memory
IDLE_SLACK_S = 0.02  # if nobody else is held up, waiting here or in the forward is the same
HOLD_LIMIT_NS = NS_PER_S  # without news of a load: far longer than a layer takes


@dataclass
class _Load:
    """The load of one request.

    Attributes:
        fixed_layers: its read buffer, whatever the rates; None: as they ask for.
        first_layers: number of layers ready when it was announced.
        layers_ready: number of layers ready now.
        announced_ns, news_ns: times when it was announced, and when the last layer arrived.
        guessed_layer_s: seconds per layer, from earlier loads; None: unknown.
        is_copy: whether it is copied within the engine's memory.
        is_certain: whether the load is confirmed: its KV is good.
        buffer_layers: its read buffer, as last chosen; None: nobody had to choose.
    """

    fixed_layers: int | None
    first_layers: int
    layers_ready: int
    announced_ns: int
    news_ns: int
    guessed_layer_s: float | None
    is_copy: bool
    is_certain: bool
    buffer_layers: float | None = None

    @property
    def layer_s(self) -> float | None:
        """Seconds per layer, measured as soon as that is possible; None: unknown."""
        num_loaded = self.layers_ready - self.first_layers
        if num_loaded:
            return (self.news_ns - self.announced_ns) / NS_PER_S / num_loaded
        return self.guessed_layer_s


class StartGate:
    """See the module docstring.

    Args:
        num_layers: of the model.
        rates: what steps and loads took until now.
    """

    def __init__(self, num_layers: int, rates: Rates) -> None:
        self._num_layers = num_layers
        self._rates = rates
        self._loads: dict[int, _Load] = {}  # by request number

    def watch(
        self,
        request: Request,
        now_ns: int,
        layers_ready: int,
        *,
        tier: str | None = None,
        fixed_layers: int | None = None,
    ) -> None:
        """Begin to watch a request's load; `fixed_layers`: its read buffer, whatever the rates."""
        guess_s = self._rates.loads.seconds(tier, request.computed_tokens) if tier else None
        self._loads[request.number] = _Load(
            fixed_layers=fixed_layers,
            first_layers=layers_ready,
            layers_ready=layers_ready,
            announced_ns=now_ns,
            news_ns=now_ns,
            guessed_layer_s=None if guess_s is None else guess_s / self._num_layers,
            is_copy=tier == HBM,
            is_certain=layers_ready == self._num_layers,
        )

    def on_progress(self, request: Request, layers_ready: int, now_ns: int) -> None:
        """Record how many layers are ready; do nothing if the request is not watched any more."""
        load = self._loads.get(request.number)
        if load is not None and layers_ready > load.layers_ready:
            load.layers_ready, load.news_ns = layers_ready, now_ns

    def is_certain(self, request: Request) -> bool:
        """Whether a request is watched, and its load is confirmed: all its KV is good."""
        load = self._loads.get(request.number)
        return load is not None and load.is_certain

    def is_copied(self, request: Request) -> bool:
        """Whether a request's KV is copied within the engine's memory: it is soon certain."""
        load = self._loads.get(request.number)
        return load is not None and load.is_copy and not load.is_certain

    def confirm(self, request: Request) -> None:
        """Record that a step over its history succeeded, and its load is confirmed."""
        load = self._loads[request.number]
        load.layers_ready, load.is_certain = self._num_layers, True

    def forget(self, request: Request) -> None:
        """Stop watching a request."""
        self._loads.pop(request.number, None)

    def buffer_layers(self, request: Request) -> float | None:
        """Return how many layers a watched request was to wait for, as last chosen.

        None: all were there when it could have started.
        """
        return self._loads[request.number].buffer_layers

    def opens_ns(self, request: Request, chunk_tokens: int, now_ns: int, *, is_idle: bool) -> int:
        """Return the time when the request may start, as far as is known; `now_ns` or less: now.

        Its first chunk would be of `chunk_tokens`; `is_idle`: nobody else is in the batch.
        """
        load = self._loads[request.number]
        if load.layers_ready == self._num_layers:
            return now_ns
        latest_ns = load.news_ns + HOLD_LIMIT_NS
        start = request.computed_tokens
        compute_s = self._rates.steps.seconds(chunk_tokens, pairs(start, start + chunk_tokens))
        layer_s = load.layer_s
        if load.fixed_layers is not None or compute_s is None or layer_s is None:
            load.buffer_layers = 1 if load.fixed_layers is None else load.fixed_layers
            return now_ns if load.layers_ready >= load.buffer_layers else latest_ns
        compute_layer_s = compute_s / self._num_layers
        load.buffer_layers = buffer_layers(self._num_layers, layer_s, compute_layer_s)
        slack_s = IDLE_SLACK_S if is_idle else compute_layer_s
        wait_s = (load.buffer_layers - load.layers_ready) * layer_s - slack_s
        # Time counts for the layer under way only; the next ones will be news.
        if wait_s > layer_s:
            return latest_ns
        return min(latest_ns, load.news_ns + int(wait_s * NS_PER_S))
