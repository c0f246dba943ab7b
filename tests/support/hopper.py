"""Compiling Triton kernels for Hopper GPUs where there is none: the interpreter runs what the compiler refuses."""

import os
import subprocess
import sys

import pytest

_BEGIN = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, types, constants, warps=4):
    constants = {"EARLY": True, **constants}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "launch_pdl": True})
"""


def check_kernels_compile(code: str) -> None:
    """Run code that calls `compiled(kernel, types, constants, warps)`, in a process without Triton's interpreter.

    Arguments that are neither among the types nor the constants are int32.
    """
    pytest.importorskip("triton.backends.nvidia")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    assert subprocess.run([sys.executable, "-c", _BEGIN + code], env=environment, check=False).returncode == 0
