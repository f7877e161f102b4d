"""Codes times vectors on a GPU, without one: machine code, and what is refused. Results: ``test_gpu_interpreter``."""

from __future__ import annotations

import pytest
import torch

gpu_codes = pytest.importorskip("tq.kernels.gpu_codes", reason="needs triton")


@pytest.mark.parametrize(("kind", "bits", "vectors"), [
    ("product", 4, 1), ("product", 3, 8), ("attend", 4, 1), ("attend", 2, 2),
])  # fmt: skip
def test_nothing_is_spilled(kind: str, bits: int, vectors: int) -> None:
    from tq.lab import sm90

    found = sm90.disassemble(gpu_codes.compiled(kind, 90, bits=bits, vectors=vectors).asm["cubin"])
    assert found["spills"] == 0 and found["opcodes"]["SHFL"] > 0  # levels come from registers


def test_tensors_of_the_host_are_refused() -> None:
    with pytest.raises(RuntimeError, match="CUDA tensors"):
        gpu_codes.multiply(
            torch.zeros(8, 32, dtype=torch.uint8), torch.ones(8), torch.ones(1, 64), 64, 4, torch.arange(16.0)
        )
