"""The C++ source is compiled once for a machine, and a start without a compiler says so."""

import os
import platform
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inference_svc.runtime.cpu.native_library import (
    KERNEL_DIR,
    NativeLibraryError,
    load_library,
)


def only_file(directory):
    """Return the one file that a directory has."""
    (found,) = directory.iterdir()
    return found


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The directory of a library that was compiled before."""
    directory = tmp_path_factory.mktemp("compiled") / "deep" / "kernels"
    load_library({KERNEL_DIR: str(directory)})
    return directory


def test_a_second_start_does_not_compile(compiled):
    """The library stays as it is, and nothing else is left in its directory."""
    made = only_file(compiled)
    before = made.stat()
    load_library({KERNEL_DIR: str(compiled)})
    after = only_file(compiled).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


@pytest.fixture
def quick_compiler(compiled, tmp_path):
    """A compiler that gives what g++ gave before; g++ itself takes ten seconds."""
    compiler = tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\nfor made; do :; done\ncp {only_file(compiled)} "$made"\n')
    compiler.chmod(0o755)
    return str(compiler)


def test_a_library_that_was_cut_off_is_compiled_again(quick_compiler, tmp_path):
    """As a crash leaves it, before its bytes have reached the disk."""
    whole, cut_off = tmp_path / "whole", tmp_path / "cut-off"
    load_library({KERNEL_DIR: str(whole), "CXX": quick_compiler})
    cut_off.mkdir()
    (cut_off / only_file(whole).name).write_bytes(b"\x7fELF")
    assert load_library({KERNEL_DIR: str(cut_off), "CXX": quick_compiler}).scratch_size
    assert only_file(cut_off).read_bytes() == only_file(whole).read_bytes()


def test_other_compilers_and_options_make_other_libraries(quick_compiler, tmp_path):
    """Each has its own name, so that a start never loads code made by other means."""
    directory = tmp_path / "kernels"
    compilers = ("", " -O1", " -mno-avx512f")
    for options in compilers:
        load_library({KERNEL_DIR: str(directory), "CXX": quick_compiler + options})
    assert len(list(directory.iterdir())) == len(compilers)


def test_no_compiler(tmp_path, monkeypatch):
    """The reason is one line."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeLibraryError, match=r"^there is no C\+\+ compiler \(g\+\+\)$"):
        load_library({KERNEL_DIR: str(tmp_path)})


def test_a_compiler_that_fails_is_quoted(tmp_path):
    """Its first error, and not what came before; nothing is left behind."""
    compiler = tmp_path / "cxx"
    compiler.write_text("#!/bin/sh\necho 'a.cpp: note' >&2\necho 'a.cpp: error: odd' >&2\nexit 1\n")
    compiler.chmod(0o755)
    directory = tmp_path / "kernels"
    with pytest.raises(NativeLibraryError, match=r"cxx: a\.cpp: error: odd$"):
        load_library({KERNEL_DIR: str(directory), "CXX": str(compiler)})
    assert list(directory.iterdir()) == []


def test_a_place_that_cannot_be_written_to(tmp_path):
    """Here a file is where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeLibraryError, match="file"):
        load_library({KERNEL_DIR: str(tmp_path / "file" / "kernels")})


def test_it_shares_torchs_threads():
    """A second OpenMP would have threads of its own, which spin beside torch's."""
    torch.ones(1 << 16).sum()
    load_library()
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    loaded = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    assert len(loaded) == 1


PROOF = """
import torch
from inference_svc.runtime.cpu.attention_kernel import AttentionKernel, why_wrong
from inference_svc.runtime.cpu.native_library import load_library
from inference_svc.runtime.cpu.product_kernel import ProductKernel
from inference_svc.runtime.kv.layer_tensors import LayerShape

library = load_library()
assert ProductKernel(library).why_unusable(torch.device("cpu"), torch.float32) == ""
assert why_wrong(AttentionKernel(library), [LayerShape((2, 48), (2, 112))], torch.float32) == ""
print(library.panel_columns())
"""


@pytest.mark.parametrize(
    "option", ["-mno-avx512f", pytest.param("-mno-avx", marks=pytest.mark.long)]
)
def test_processors_with_shorter_vectors_are_served(option):
    """As compiled for them, both kernels are right; in a process, which has one library.

    They are compiled once for a machine, and again after a change of their sources.
    """
    if platform.machine() != "x86_64":
        pytest.skip("the options are those of x86")
    environ = {**os.environ, "CXX": f"g++ {option}"}
    proof = [sys.executable, "-c", PROOF]
    found = subprocess.run(proof, env=environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) <= 16
