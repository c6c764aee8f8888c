"""The price of a server, and the cost of a replay. Pure, except that it reads the file of prices.

An engine without a cache costs its GPUs while they compute. With a cache, DRAM and SSD are paid for
during the whole replay, whether a GPU computes or not. If the engine is always busy, as in the
paper's experiment, both times are the same, and so is the sum.

*Source:* CachedAttention §4.2, "Inference cost": on-demand prices of AWS EC2. With them, an hour of
128 GB of DRAM and 10 TB of SSD is 16.3 % of the sum with two GPUs, 8.9 % with four; the paper has
16.4 % and 9.0 % (it counts 1 TB as 1,024 GB).
"""

import tomllib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvd.plan.sizes import GB
from shared.types.errors import InvalidInputError

GPUS_OF_MODEL = {"llama-13b": 2, "llama-65b": 4, "llama-70b": 4, "falcon-40b": 4}  # as in the paper


class BadPricesError(InvalidInputError):
    """The file has no prices, or something else."""

    reason = "bad_prices"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices per hour, in dollars or any other currency; the names are those in the file."""

    gpu: float = 5.0
    dram_gb: float = 0.0088
    ssd_gb: float = 0.000082


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a replay."""

    gpu: float
    dram: float
    ssd: float

    @property
    def total(self) -> float:
        """Cost of GPUs, DRAM and SSD together."""
        return self.gpu + self.dram + self.ssd

    @property
    def storage_share(self) -> float:
        """Share of DRAM and SSD in the total; 0 if nothing costs anything."""
        return (self.dram + self.ssd) / self.total if self.total else 0.0

    def as_dict(self) -> dict[str, float]:
        """Return the costs by field, with the total."""
        return {**asdict(self), "total": self.total}


def cost_of(
    prices: Prices,
    *,
    num_gpus: int,
    gpu_hours: float,
    storage_hours: float,
    dram_bytes: int,
    ssd_bytes: int,
) -> Cost:
    """Return the cost of computing for `gpu_hours`, and of DRAM and SSD for `storage_hours`."""
    return Cost(
        gpu=prices.gpu * num_gpus * gpu_hours,
        dram=prices.dram_gb * dram_bytes / GB * storage_hours,
        ssd=prices.ssd_gb * ssd_bytes / GB * storage_hours,
    )


def read_prices(path: Path) -> Prices:
    """Read a TOML file of prices; prices that it does not have are the paper's.

    Raises:
        BadPricesError: the file cannot be read, or has something else in it.
    """
    names = [field.name for field in fields(Prices)]
    remedy = f"give a TOML file with prices per hour: {', '.join(names)}"
    try:
        found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadPricesError(f"{path}: cannot be read ({error.strerror})", remedy) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadPricesError(f"{path}: the file is not valid TOML ({error})", remedy) from error
    for name, value in found.items():
        if name not in names:
            raise BadPricesError(f"{path}: there is no price named {name}", remedy)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf"):
            raise BadPricesError(f"{path}: {name} = {value!r} is not a price", remedy)
    return Prices(**{name: float(value) for name, value in found.items()})
