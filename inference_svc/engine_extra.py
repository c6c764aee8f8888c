"""What only a host that runs a model needs: PyTorch and Transformers, the extra `engine`."""

from importlib.util import find_spec

from shared.types.errors import ConfigError

EXTRA = "cachedattention[engine]"
MODULES = ("torch", "transformers", "safetensors", "jinja2")  # of its packages


class EngineMissingError(ConfigError):
    """The package was installed without its extra `engine`."""

    reason = "engine_missing"


def require_engine() -> None:
    """See to it that a model can be run here; imports nothing.

    Raises:
        EngineMissingError: it cannot.
    """
    missing = [module for module in MODULES if find_spec(module) is None]
    if missing:
        raise EngineMissingError(
            f"this needs {', '.join(missing)}", f"install the extra: pip install '{EXTRA}'"
        )
