"""What the compiler made of a Triton kernel: registers, spills and instructions of its machine code. Needs no GPU.

Reads the machine code with the tools that come with Triton. Counts are static: nothing is run, nothing is timed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any


def disassemble(cubin: bytes) -> dict[str, Any]:
    """registers, spills and {opcode: count} of machine code."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = (
            subprocess.run([str(tools / tool), option, file.name], check=True, capture_output=True, text=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no registers: {usage[:200]!r}")
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z0-9]+)", code))
    return dict(registers=int(found[1]), spills=int(found[2]), opcodes=dict(opcodes))


def resources(compiled: Any, elements: int) -> dict[str, Any]:
    """What a thread of a compiled kernel needs and runs; the arguments are what ``tq.kernels.gpu.compiled`` returns.

    Returns registers a thread, spills (bytes of stack), shared_bytes, instructions (static, rare branches included),
    instructions_per_element (a thread runs them once for its ``elements``) and opcodes {opcode: count}.
    """
    found = disassemble(compiled.asm["cubin"])
    count = sum(found["opcodes"].values())
    return found | dict(
        shared_bytes=compiled.metadata.shared, elements=elements, instructions=count,
        instructions_per_element=count / elements,
    )  # fmt: skip
