"""What is planned for: models by the KV bytes they keep per token, and the machine. Pure.

*Source:* the constants of the engine reproduce the paper's own TTFT and GPU hours (CachedAttention
§4.2, LLaMA-13B on two A100): 0.9 s to prefill about 1.8K tokens.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model as the planner sees it.

    Attributes:
        kv_bytes_per_token: of K and V of all layers.
        window_tokens: the longest context.
    """

    name: str
    kv_bytes_per_token: int
    window_tokens: int


# Of the paper's models its own figures (Table 1, §4.1; MB = 10**6), so that its experiments can be
# planned with its numbers: by the models' shapes they are 0.82, 2.62, 0.33 and 0.12 MB.
MODELS = {
    model.name: model
    for model in (
        PlannedModel("llama-13b", 780_000, 4096),
        PlannedModel("llama-65b", 2_500_000, 2048),
        PlannedModel("llama-70b", 310_000, 4096),
        PlannedModel("falcon-40b", 120_000, 2048),
        PlannedModel("mistral-7b", 32 * 2 * 8 * 128 * 2, 32768),  # layers, K and V, heads, size, B
    )
}


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """How long computing takes.

    Attributes:
        slots: turns that run at the same time.
        prefill_s_per_token: of prompt tokens that are computed.
        decode_step_s: one token of every turn that decodes.
        fixed_s: of every prefill, however short.
    """

    slots: int = 24
    prefill_s_per_token: float = 0.5e-3
    decode_step_s: float = 20e-3
    fixed_s: float = 20e-3


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machine.

    Attributes:
        hbm_bytes: for the KV of turns that run; 0: only the slots bound them.
        ssd_bytes_per_s: of reads; writes cost no time.
        pcie_bytes_per_s: DRAM to HBM.
    """

    dram_bytes: int
    ssd_bytes: int
    hbm_bytes: int = 0
    ssd_bytes_per_s: float = 5e9
    pcie_bytes_per_s: float = 25e9
    engine: EngineConstants = field(default_factory=EngineConstants)
