"""Packing of 1-8 bit indices into bytes, block by block, in planes of 8, 4, 2 or 1 bit.

A width that does not divide 8 is split into planes that do (3 = 2+1, 5 = 4+1, 6 = 4+2, 7 = 4+2+1), stored one after
the other, the lowest bits of the index first; inside a byte the first element sits in the lowest bits. Every plane of
every block starts on a byte, so blocks can be cut out, sent and decoded alone. No run-length or entropy coding.

Shapes: N blocks, B block size, W bytes a block.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PLANES: dict[int, tuple[int, ...]] = {
    1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)
}  # fmt: skip


def packed_bytes(bits: int, block: int) -> int:
    """Bytes W that one block of ``block`` indices takes; exactly ``bits * block / 8`` if ``block`` divides by 8."""
    return sum(-(-block * width // 8) for width in PLANES[bits])


def pack(index_NB: Tensor, bits: int) -> Tensor:
    """Pack indices [N, B] (any integer dtype, values below 2**bits) into uint8 [N, W]."""
    rest = index_NB.to(torch.uint8)
    n, block = rest.shape
    planes = []
    for width in PLANES[bits]:
        per_byte = 8 // width
        part = F.pad(rest & (2**width - 1), (0, -block % per_byte))
        part = part.view(n, part.shape[1] // per_byte, per_byte)
        plane = part[:, :, 0].clone()
        for k in range(1, per_byte):
            plane |= part[:, :, k] << (k * width)
        planes.append(plane)
        if width < 8:
            rest = rest >> width
    return planes[0] if len(planes) == 1 else torch.cat(planes, dim=1)


def unpack(code_NW: Tensor, bits: int, block: int) -> Tensor:
    """Inverse of ``pack``: uint8 [N, W] to uint8 indices [N, B]."""
    index_NB = torch.zeros(code_NW.shape[0], block, dtype=torch.uint8, device=code_NW.device)
    first_byte = first_bit = 0
    for width in PLANES[bits]:
        size = -(-block * width // 8)
        plane = code_NW[:, first_byte : first_byte + size]
        parts = [(plane >> (k * width)) & (2**width - 1) for k in range(8 // width)]
        part = torch.stack(parts, dim=2).flatten(1)[:, :block]
        index_NB |= part << first_bit
        first_byte, first_bit = first_byte + size, first_bit + width
    return index_NB
