"""Models in one GGUF file, as llama.cpp has them: Transformers reads and dequantises them.

Every start does that anew, which takes much longer than loading a directory with safetensors
weights: docs/getting-a-model.md says how such a directory is made of the file, once.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

from inference_svc.core.errors import UnsupportedModelError

PACKAGES = ("gguf", "accelerate")  # that Transformers reads such files with
_MAGIC = b"GGUF"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def is_gguf(path: Path) -> bool:
    """Whether that is a file in this format, whatever its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_gguf(path: Path, packages: Sequence[str] = PACKAGES) -> None:
    """Check that such a file can be read here.

    Raises:
        UnsupportedModelError: it is a part of a model, or packages are missing.
    """
    if _PART.search(path.name):
        raise UnsupportedModelError(
            f"{path} is one of the parts of a GGUF model",
            "merge them with llama.cpp's llama-gguf-split --merge, and give the one file",
        )
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UnsupportedModelError(
            f"{path} is a GGUF model, which cannot be read without {' and '.join(missing)}",
            f"pip install {' '.join(missing)}, or convert it elsewhere: docs/getting-a-model.md",
        )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep the bar that Transformers draws for such files, whatever it is told, out of the log."""
    with redirect_stderr(io.StringIO()):
        yield


def gguf_hint(path: Path) -> str:
    """What to give instead of a directory that has nothing but such a file; "" if it has none."""
    found = sorted(path.glob("*.gguf"))
    return f"give the GGUF file itself: {found[0]}" if found else ""
