"""A kernel compiled ahead of time for a device that needn't be here, and what it takes of it."""

import importlib
import re
import subprocess
import tempfile
from types import ModuleType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sparkgpt.ops.kernels.specimen import Specimen

# Bytes of shared memory that one block may take, by compute capability (CUDA C++ Programming
# Guide, technical specifications).
SHARED_LIMIT = {90: 232_448, 100: 232_448, 120: 101_376, 121: 101_376}
USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


def family_module(family: str) -> ModuleType:
    """`sparkgpt.ops.kernels.<family>`; a name with dots is a module's own."""
    return importlib.import_module(family if "." in family else f"sparkgpt.ops.kernels.{family}")


def compiled(family: str, index: int, arch: int) -> dict[str, object]:
    """The row of one of a family's specimens: its names, its `problems`, and what it takes.

    Registers are a thread's, bytes of stack and local memory (where spilled registers go) too;
    bytes of shared memory a block's. These four are missing when it doesn't compile.
    """
    module = family_module(family)
    specimen = module.specimens()[index]
    config = specimen.config
    row = {
        "family": module.FAMILY,
        "kernel": specimen.name,
        "label": label_of(specimen),
        "tiles": dict(config.tiles),
        "arch": arch,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    try:
        usage = usage_of(specimen, arch)
    except Exception as error:  # whatever the compiler raises: the others' rows matter too
        first = (str(error).strip() or repr(error)).split("\n")[0]
        return {**row, "problems": [f"doesn't compile: {first}"], "ok": False}
    problems = problems_of(usage, arch)
    return {**row, **usage, "problems": problems, "ok": not problems}


def usage_of(specimen: Specimen, arch: int) -> dict[str, int]:
    """Compile by Triton and its ptxas, and read the binary's needs. Raises what they raise."""
    kernel = specimen.kernel
    if not isinstance(kernel, JITFunction):
        raise RuntimeError("made for Triton's interpreter: TRITON_INTERPRET was set at import")
    constants = {**specimen.constants, **specimen.config.tiles}
    types = {**specimen.signature, **dict.fromkeys(constants, "constexpr")}
    signature = {name: types[name] for name in kernel.arg_names}
    target = GPUTarget("cuda", arch, 32)
    options = {"num_warps": specimen.config.num_warps, "num_stages": specimen.config.num_stages}
    source = ASTSource(kernel, signature, constants, _hints(specimen))
    binary = triton.compile(source, target=target, options=options)
    registers, stack, local = _resources(binary.asm["cubin"])
    return {
        "shared_bytes": binary.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
        "local_bytes": local,
    }


def problems_of(usage: dict[str, int], arch: int) -> list[str]:
    """Why a binary must not be shipped for a device: spills count on sm_12x, our target."""
    found = []
    if usage["shared_bytes"] > SHARED_LIMIT[arch]:
        found.append(f"{usage['shared_bytes']:,} bytes of shared memory of {SHARED_LIMIT[arch]:,}")
    for name in ("stack", "local") if arch >= 120 else ():
        if usage[f"{name}_bytes"]:
            found.append(f"{usage[f'{name}_bytes']:,} bytes of {name} memory: registers spill")
    return found


def label_of(specimen: Specimen) -> str:
    """`bf16 E=8`: the types of what its pointers lead to, integers apart, and its constants."""
    types = dict.fromkeys(t[1:] for t in specimen.signature.values() if t.startswith("*"))
    words = [t for t in types if not t.startswith(("i", "u"))] or [*types]
    return " ".join([",".join(words), *(f"{k}={v}" for k, v in specimen.constants.items())])


def _hints(specimen: Specimen) -> dict[tuple[int], list]:
    """What a launch would find: torch's pointers and our widths are multiples of 16."""
    hint = [["tt.divisibility", 16]]
    return {
        (p.num,): hint
        for p in specimen.kernel.params
        if specimen.signature.get(p.name, "fp32")[0] in "*iu"
        and not (p.do_not_specialize or p.do_not_specialize_on_alignment)
    }


def _resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, bytes of stack and of local memory, as cuobjdump reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (found,) = USAGE.findall(text)  # one kernel in each binary
    registers, stack, local = map(int, found)
    return registers, stack, local
