"""The start gate: when a request may join the batch although its history is still being loaded.

Early enough that loading hides behind computing, late enough that no layer waits: a forward that
waits delays every request in the batch. The attention of layer *l* needs layer *l* of the history.
Layers are loaded one by one while the forward computes. If a layer takes longer to load than to
compute, the load must be ahead when the forward starts: by the paper's read buffer, S_buf, which
follows from measured rates (`buffer_layers`). The gate opens once that much is loaded. The layer
that is being loaded counts in proportion to the time that has passed. While rates are unknown, one
loaded layer is enough.

No request is held for ever. The wait of a forward for a layer has a deadline and this gate has
none, so that a load without progress is let through after a while, to fail there.

Invariant: KV that is not certain, because its load may still fail, is never kept as a resident.

*Source:* CachedAttention §3.2.1, fig. 7.
"""

from dataclasses import dataclass

from inference_svc.core.rates.rates import Rates, pairs
from inference_svc.core.scheduling.request import Request
from shared.types.units import NS_PER_S


def buffer_layers(num_layers: int, load_layer_s: float, compute_layer_s: float) -> float:
    """Return how many layers have to be loaded when a forward starts: the read buffer, S_buf.

    With fewer a layer waits, with more the forward starts later than it could.

    Layer l is needed l · compute_layer_s after the start. If S layers are loaded at the start, it
    arrives (l + 1 - S) · load_layer_s after it. The last layer is in time from the returned S on,
    and so is every layer before it. If loading is faster than computing, only the first layer is
    waited for.

    The paper's S_buf = B · (T_load · L_hist - T_pref · L_new) is, with the bandwidth B of one layer
    each load_layer_s, num_layers · (1 - compute_layer_s / load_layer_s) layers. It hides loading
    behind the computing of all layers, that of the last one included: so the last layer would
    arrive when it should have been computed. That is too late by the computing of one layer, or by
    one load if loading is faster.

    Args:
        num_layers: number of the model's layers.
        load_layer_s: seconds to load one layer of the history.
        compute_layer_s: seconds to compute one layer of the forward.

    Returns:
        Between 1 and num_layers; not rounded: half a layer stands for half of its loading time.
    """
    if load_layer_s <= compute_layer_s:
        return 1.0
    return num_layers - (num_layers - 1) * compute_layer_s / load_layer_s


HBM = "hbm"  # the tier of KV in the engine's own memory
IDLE_SLACK_S = 0.02  # if no other request is delayed, waiting in the forward costs nothing
HOLD_LIMIT_NS = NS_PER_S  # without progress of a load: far longer than a layer takes


@dataclass
class _Load:
    """The load of one request.

    Attributes:
        fixed_layers: its read buffer in layers; None: chosen from the measured rates.
        first_layers: number of layers that were ready when the load was announced.
        layers_ready: number of layers ready now.
        announced_ns, news_ns: times when it was announced, and when the last layer arrived.
        guessed_layer_s: seconds per layer, from earlier loads; None: unknown.
        is_copy: whether it is a copy within the engine's memory.
        is_certain: whether the load is confirmed: its KV is good.
        buffer_layers: its read buffer in layers, as last chosen; None: it was never needed.
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
    """Holds each request back until enough of its history is loaded.

    Args:
        num_layers: number of the model's layers.
        rates: measured rates of steps and loads.
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
        """Begin to watch a request's load.

        Args:
            request: the request; `computed_tokens` of it are loaded.
            now_ns: the time.
            layers_ready: number of layers that are ready.
            tier: the tier it is loaded from; None: earlier loads tell nothing about it.
            fixed_layers: its read buffer in layers; None: chosen from the measured rates.
        """
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
        """Record how many layers are ready; do nothing if the request is no longer watched."""
        load = self._loads.get(request.number)
        if load is not None and layers_ready > load.layers_ready:
            load.layers_ready, load.news_ns = layers_ready, now_ns

    def is_certain(self, request: Request) -> bool:
        """Return whether a request is watched and its load is confirmed: all its KV is good."""
        load = self._loads.get(request.number)
        return load is not None and load.is_certain

    def is_copied(self, request: Request) -> bool:
        """Return whether a request's KV is being copied within the engine's memory.

        Such a load is certain soon.
        """
        load = self._loads.get(request.number)
        return load is not None and load.is_copy and not load.is_certain

    def confirm(self, request: Request) -> None:
        """Record that a step over the request's history succeeded: its load is confirmed."""
        load = self._loads[request.number]
        load.layers_ready, load.is_certain = self._num_layers, True

    def forget(self, request: Request) -> None:
        """Stop watching a request."""
        self._loads.pop(request.number, None)

    def buffer_layers(self, request: Request) -> float | None:
        """Return the read buffer of a watched request in layers, as last chosen.

        None: all layers were ready when it could have started.
        """
        return self._loads[request.number].buffer_layers

    def opens_ns(self, request: Request, chunk_tokens: int, now_ns: int, *, is_idle: bool) -> int:
        """Return the time when the request may start, as far as is known; `now_ns` or less: now.

        Args:
            request: a watched request.
            chunk_tokens: number of tokens of its first chunk.
            now_ns: the time.
            is_idle: whether the batch is empty.
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
        # Passed time counts for the layer that is being loaded only; each later one is reported.
        if wait_s > layer_s:
            return latest_ns
        return min(latest_ns, load.news_ns + int(wait_s * NS_PER_S))
