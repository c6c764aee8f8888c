"""The request for a plan that a command line of `kvd plan` makes. Pure, but reads named files.

All errors in options are found here, before the first replay.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from kvd.core.eviction.policies import POLICIES
from kvd.plan.agents import agents
from kvd.plan.belady import BeladyPolicy
from kvd.plan.figures import Capacity
from kvd.plan.fleet import FleetOptions
from kvd.plan.formats.filling import Filling
from kvd.plan.generate import sharegpt_like
from kvd.plan.hardware import EngineConstants, Hardware, PlannedModel, ReplayOptions, engine_at_load
from kvd.plan.model_choice import calibrated, choose_model
from kvd.plan.options import (
    ArrivalArguments,
    CapacityArguments,
    CostArguments,
    EngineArguments,
    KvdArguments,
    ServerArguments,
)
from kvd.plan.planning import PlanRequest, check_window, footprint_bytes
from kvd.plan.prices import GPUS_OF_MODEL, Prices, read_prices
from kvd.plan.routing import ROUTINGS
from kvd.plan.sizes import (
    DEFAULT_SHARES,
    BadOptionError,
    duration_of,
    format_size,
    names_of,
    numbers_of,
    parts_of,
    rate_of,
    share_of,
    size_of,
    sizes_of,
    ttl_of,
    turns_of,
)
from kvd.plan.trace import Session
from kvd.plan.workload import FORMATS, Workload, read_workload
from shared.types.kv_layout import MAX_STATE_BYTES

GENERATORS = ("sharegpt-like", "agents")
KNOWN_POLICIES = (*POLICIES, BeladyPolicy.name)
POLICIES_TO_TRY = "lru,predictive,belady"
SEVERAL_SERVERS_POLICY = "predictive"  # the daemon's default: such plans compare servers
MS_PER_S = 1e3


def request_of(
    arrivals: ArrivalArguments,
    engine: EngineArguments,
    capacity: CapacityArguments,
    servers: ServerArguments,
    kvd: KvdArguments,
    cost: CostArguments,
    command: tuple[str, ...],
) -> PlanRequest:
    """Return the request for the plan that a command line describes.

    Raises:
        ReportedError: an option or a file is not usable.
    """
    model = _model(engine)
    fleets = fleets_of(servers, arrivals.seed)
    workload = _workload(arrivals, model, max(fleet.share for fleet in fleets))
    if kvd.positions == "coupled":
        workload = workload.with_coupled_positions()
    elif model.state_bytes:
        workload = workload.with_states(model.window_tokens)
    check_window(workload, model, kvd.charge)
    hardware = Hardware(
        dram_bytes=0,
        ssd_bytes=0,
        ssd_bytes_per_s=rate_of(capacity.ssd_bandwidth, "--ssd-bandwidth"),
        pcie_bytes_per_s=rate_of(capacity.pcie_bandwidth, "--pcie-bandwidth"),
        engine=_engine(engine, workload, fleets),
    )
    return PlanRequest(
        workload=workload,
        model=model,
        hardware=hardware,
        options=_options(arrivals, kvd, model, workload),
        capacities=_capacities(capacity, fleets, footprint_bytes(workload, model, kvd.charge)),
        policies=names_of(
            kvd.policy or (SEVERAL_SERVERS_POLICY if _are_several(fleets) else POLICIES_TO_TRY),
            KNOWN_POLICIES,
            "policy",
        ),
        prices=read_prices(cost.prices) if cost.prices else Prices(),
        num_gpus=cost.gpus or GPUS_OF_MODEL.get(model.name, 1),
        num_workers=cost.jobs or len(os.sched_getaffinity(0)),
        command=command,
        fleets=fleets,
    )


def fleets_of(arguments: ServerArguments, seed: int) -> list[FleetOptions]:
    """Return the fleets to replay: each number of servers with each routing.

    Raises:
        BadOptionError: an option is not usable.
    """
    numbers = numbers_of(arguments.servers, "--servers")
    routings = names_of(arguments.routing, ROUTINGS, "routing")
    template = FleetOptions(
        remote_bytes_per_s=rate_of(arguments.remote, "--remote") if arguments.remote else 0.0,
        remote_write=arguments.remote_write,
        remote_wait=arguments.remote_wait,
        quiet_s=duration_of(arguments.remote_quiet, "--remote-quiet"),
        failures_per_day=positive(arguments.failures, "--failures", may_be_zero=True),
        drains_per_day=positive(arguments.drains, "--drains", may_be_zero=True),
        away_s=duration_of(arguments.away, "--away"),
        seed=seed,
    )
    return [
        replace(
            template,
            num_servers=number,
            num_replayed=min(number, arguments.replayed),
            routing=routing,
        )
        for number in numbers
        for routing in (routings if number > 1 else routings[:1])
    ]


def _are_several(fleets: Sequence[FleetOptions]) -> bool:
    return any(fleet.num_servers > 1 for fleet in fleets)


def _model(arguments: EngineArguments) -> PlannedModel:
    kv_bytes = state_bytes = None
    if arguments.kv_bytes_per_token:
        kv_bytes = size_of(arguments.kv_bytes_per_token, "--kv-bytes-per-token")
    if arguments.state_bytes:
        state_bytes = size_of(arguments.state_bytes, "--state-bytes")
        if state_bytes > MAX_STATE_BYTES:
            most = format_size(MAX_STATE_BYTES)
            raise BadOptionError(
                f"--state-bytes {arguments.state_bytes} is too large", f"give {most} at most"
            )
    model = choose_model(arguments.model, kv_bytes, arguments.window, state_bytes)
    if kv_bytes == 0 and not model.state_bytes:
        raise BadOptionError(
            "--kv-bytes-per-token is 0", "give the size of a token's KV, such as 320KB"
        )
    return model


def _workload(arguments: ArrivalArguments, model: PlannedModel, share: float) -> Workload:
    """Read the sessions, or draw the largest share of them that is replayed."""
    if (arguments.trace is None) == (not arguments.generate):
        raise BadOptionError(
            "it is not clear which sessions to replay",
            f"give --trace FILE, or --generate {' or '.join(GENERATORS)}",
        )
    if arguments.format not in FORMATS:
        raise BadOptionError(
            f"there is no format {arguments.format}", f"give one of {', '.join(FORMATS)}"
        )
    rate = positive(arguments.rate, "--rate")
    if arguments.trace is not None:
        filling = Filling(arguments.seed, rate, model.window_tokens)
        workload = read_workload(arguments.trace, arguments.format, filling)
    else:
        drawn = _draw(arguments, max(1, round(arguments.sessions * share)), rate * share, model)
        workload = Workload(f"{arguments.generate}, seed {arguments.seed}", drawn, share)
    if arguments.arrival_rate is not None:
        arrival_rate = positive(arguments.arrival_rate, "--arrival-rate")
        return workload.with_arrival_rate(arrival_rate * workload.share)
    return workload


def _draw(
    arguments: ArrivalArguments, num_sessions: int, rate: float, model: PlannedModel
) -> list[Session]:
    if arguments.generate not in GENERATORS:
        raise BadOptionError(
            f"there is no generator {arguments.generate}", f"give one of {', '.join(GENERATORS)}"
        )
    if arguments.generate == "agents":
        return agents(num_sessions, rate, arguments.seed)
    return sharegpt_like(num_sessions, rate, model.window_tokens, arguments.seed)


def _engine(
    arguments: EngineArguments, workload: Workload, fleets: Sequence[FleetOptions]
) -> EngineConstants:
    """Return the engine's constants: defaults, then calibration, then options, then --load."""
    engine = calibrated(EngineConstants(), arguments.calibration or ())
    if arguments.slots is not None:
        engine = replace(engine, slots=arguments.slots)
    engine = replace(
        engine,
        prefill_s_per_token=_seconds(
            arguments.prefill_ms_per_token, "--prefill-ms-per-token", engine.prefill_s_per_token
        ),
        fixed_s=_seconds(arguments.fixed_ms, "--fixed-ms", engine.fixed_s),
        decode_step_s=_seconds(arguments.decode_step_ms, "--decode-step-ms", engine.decode_step_s),
    )
    if arguments.load is None:
        return engine
    workload.check_rate("--load")
    numbers = {fleet.num_servers for fleet in fleets}
    if len(numbers) > 1:
        raise BadOptionError(
            "--load works with one number of servers only",
            "give one number of servers, or leave --load out",
        )
    load_of_all = positive(arguments.load, "--load") * numbers.pop() * workload.share
    return engine_at_load(workload.sessions, engine, load_of_all)


def _seconds(given_ms: float | None, option: str, otherwise_s: float) -> float:
    return (
        otherwise_s if given_ms is None else positive(given_ms, option, may_be_zero=True) / MS_PER_S
    )


def _options(
    arrivals: ArrivalArguments, kvd: KvdArguments, model: PlannedModel, workload: Workload
) -> ReplayOptions:
    return ReplayOptions(
        policy="",
        kv_bytes_per_token=model.kv_bytes_per_token,
        charge=kvd.charge,
        window_tokens=model.window_tokens,
        tiers=kvd.tiers,
        ttl_s=ttl_of(kvd.ttl, "--ttl"),
        watermark=share_of(kvd.watermark, "--watermark"),
        warmup_turns=turns_of(arrivals.warmup_turns, "--warmup-turns", workload.num_turns),
        load_policy=kvd.load_policy,
        state_bytes=model.state_bytes,
        windowed_bytes_per_token=model.windowed_bytes_per_token,
        attention_window=model.attention_window,
        end_hints=kvd.end_hints,
        tool_hints=kvd.tool_hints,
        think_scale=positive(arrivals.think_scale, "--think-scale", may_be_zero=True),
    )


def _capacities(
    arguments: CapacityArguments, fleets: Sequence[FleetOptions], footprint: int
) -> list[Capacity]:
    has_sizes = bool(arguments.dram or arguments.ssd)
    if has_sizes and arguments.capacity_share:
        raise BadOptionError(
            "sizes and shares cannot be used together",
            "give either --dram and --ssd, or --capacity-share",
        )
    if has_sizes:
        return swept_capacities(arguments.hbm, arguments.dram, arguments.ssd)
    if _are_several(fleets):
        raise BadOptionError(
            "the sizes of each server's tiers are not given",
            "give --dram and --ssd, which count for each server",
        )
    shares = arguments.capacity_share or DEFAULT_SHARES
    return shared_capacities(arguments.hbm, shares, arguments.dram_share, footprint)


def swept_capacities(hbm: str, dram: str, ssd: str) -> list[Capacity]:
    """Return all combinations of HBM, DRAM and SSD; a tier without sizes has none.

    Raises:
        BadOptionError: one of them is no size.
    """
    hbms = sizes_of(hbm, "--hbm")
    drams = sizes_of(dram, "--dram") if dram else [0]
    ssds = sizes_of(ssd, "--ssd") if ssd else [0]
    return [Capacity(*sizes) for sizes in product(hbms, drams, ssds)]


def shared_capacities(
    hbm: str, shares: str, dram_share: str, footprint_bytes: int
) -> list[Capacity]:
    """Return combinations of HBM with shares of the footprint, split into DRAM and SSD.

    Raises:
        BadOptionError: one of them is no share.
    """
    of_dram = share_of(dram_share, "--dram-share")
    found = []
    for hbm_bytes in sizes_of(hbm, "--hbm"):
        for part in parts_of(shares, "--capacity-share"):
            total = round(share_of(part, "--capacity-share", most=10.0) * footprint_bytes)
            dram_bytes = round(total * of_dram)
            found.append(Capacity(hbm_bytes, dram_bytes, total - dram_bytes))
    return found


def positive(value: float, option: str, *, may_be_zero: bool = False) -> float:
    """Check that a number of the command line is positive.

    Raises:
        BadOptionError: the value is not above 0, or not finite.
    """
    if math.isfinite(value) and (value > 0 or (may_be_zero and not value)):
        return value
    remedy = "give 0 or more" if may_be_zero else "give a number above 0"
    raise BadOptionError(f"{option} {value:g} is not valid", remedy)
