"""When a forward may start so that no layer waits for its load: the paper's read buffer.

Layer *l*'s attention needs layer *l* of the history. Loading goes on layer by layer while the
forward computes; if a layer loads slower than it is computed, the load must be ahead when the
forward starts. How far ahead is the read buffer.

*Source:* CachedAttention §3.2.1, fig. 7: `S_buf = B · (T_load · L_hist - T_pref · L_new)`. Here
`T_load · L_hist` is num_layers · load_layer_s, `T_pref · L_new` is num_layers · compute_layer_s,
and the bandwidth B is one layer each load_layer_s.
"""

from math import ceil


def start_in_s(
    num_layers: int, layers_ready: int, load_layer_s: float, compute_layer_s: float
) -> float:
    """How long a forward must wait, from now, so that none of its layers waits; ≥ 0.

    If it starts after d seconds, layer l is needed at d + l · compute_layer_s, and is there at
    (l + 1 - layers_ready) · load_layer_s. The worst layer is the first or the last that is
    missing, because the difference is linear in l.

    Args:
        num_layers: of the model.
        layers_ready: how many, from the first, are loaded; the next one's load begins now.
        load_layer_s: seconds to load one layer of the history.
        compute_layer_s: seconds to compute one layer of the forward.
    """
    missing = num_layers - layers_ready
    if missing <= 0:
        return 0.0
    first = load_layer_s - layers_ready * compute_layer_s
    last = missing * load_layer_s - (num_layers - 1) * compute_layer_s
    return max(0.0, first, last)


def buffer_layers(num_layers: int, load_layer_s: float, compute_layer_s: float) -> int:
    """S_buf in layers: how many must be loaded before the forward starts; 0…num_layers.

    The paper's formula, rounded up. It lets the load end when the forward ends; the last layer is
    needed one compute_layer_s earlier, which `start_in_s` counts and this does not.
    """
    if load_layer_s <= compute_layer_s:
        return 0
    return ceil(num_layers * (load_layer_s - compute_layer_s) / load_layer_s)
