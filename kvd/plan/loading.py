"""Whether loading a token's KV is sooner than computing it, on the machine of a plan. Pure.

It need not be: `--load` changes how fast the engine computes, and leaves SSD and PCIe as they are.
Then caching loses, however much is found, unless what is computed sooner is computed
(`--load-policy auto`).
"""

from kvd.plan.figures import PlanReport

US_PER_S = 1e6


def history_text(report: PlanReport) -> str:
    """What a token of history takes, computed and loaded; and what follows if loading is slower."""
    compute_s = report.engine.prefill_s_per_token
    kv_bytes = report.model.kv_bytes_per_token
    dram_s = kv_bytes / report.options["pcie_bytes_per_s"]
    ssd_s = dram_s + kv_bytes / report.options["ssd_bytes_per_s"]
    text = (
        f"{_micros(compute_s)} a token to compute, {_micros(dram_s)} to load from DRAM,"
        f" {_micros(ssd_s)} from SSD"
    )
    if ssd_s <= compute_s or report.options["load_policy"] == "never":
        return text
    where = "from both" if dram_s > compute_s else "from SSD"
    if report.options["load_policy"] == "auto":
        return f"{text}: what loads slower, {where}, is computed"
    return f"{text}: loading {where} loses time; --load-policy auto computes instead"


def _micros(seconds: float) -> str:
    return f"{seconds * US_PER_S:,.3g} µs"
