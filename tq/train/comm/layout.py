"""How a tensor is cut into chunks for the ranks, and where a message keeps payload, scales and its mark.

A message is the payload of a chunk's blocks, then their scales, each padded to 16 bytes, then 16 bytes of which the
last one is zero: views of one buffer, into which the codec writes. A message that its sender could not make has all
bits set: each of its scales is NaN, and the last byte says why.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tq.quant.codec import Code, Codec

Codecs = tuple[Codec, Codec]  # of the two phases of an all-reduce
Key = tuple[int, ...]  # names the seeds of a tensor: (step, number of the bucket, ...)
_ALIGNED = 16


def seeded(codec: Codec, key: Key, *phase: int) -> Codec:
    """The codec of a tensor in one phase of an exchange: a kernel can take the step's seed from a counter."""
    step, *names = key
    return codec.derive(*names, *phase).at_step(step)


def code_bytes(codec: Codec, numel: int) -> int:
    """Bytes of the code of a flat tensor."""
    return codec.blocks((numel,)) * codec.block_bytes


def chunk_of(numel: int, block: int, rank: int, ranks: int) -> tuple[int, int]:
    """(first, end) block of the chunk that a rank averages: whole blocks, the last ranks may get fewer or none."""
    blocks = -(-numel // block)
    each = -(-blocks // ranks)
    return min(rank * each, blocks), min((rank + 1) * each, blocks)


def chunk_numel(numel: int, block: int, rank: int, ranks: int) -> int:
    """Elements of that chunk."""
    first, end = chunk_of(numel, block, rank, ranks)
    return min(end * block, numel) - min(first * block, numel)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def message_bytes(codec: Codec, blocks: int) -> int:
    """Bytes of the message that carries so many blocks."""
    return _padded(blocks * codec.packed_bytes) + _padded(blocks * codec.scale_dtype.itemsize) + _ALIGNED


def view_code(codec: Codec, message: Tensor, blocks: int, numel: int, dtype: torch.dtype) -> Code:
    """The code of ``numel`` elements in a message that has room for ``blocks`` blocks: a view."""
    used, start = -(-numel // codec.block), _padded(blocks * codec.packed_bytes)
    payload = message[: used * codec.packed_bytes].view(used, codec.packed_bytes)
    scales = message[start : start + used * codec.scale_dtype.itemsize].view(codec.scale_dtype)
    return Code(codec, (numel,), dtype, payload, scales)


def new_messages(rows: int, nbytes: int, device: torch.device) -> Tensor:
    """Room for messages, uint8 [rows, bytes], which say that they were made."""
    messages = torch.empty(rows, nbytes, dtype=torch.uint8, device=device)
    messages[:, -1] = 0
    return messages


def unmake(message: Tensor) -> None:
    """Makes a message one that its sender could not make."""
    message.fill_(255)


def unmade(messages: Tensor) -> list[int]:
    """Rows of uint8 [ranks, bytes] whose senders could not make them. Waits for a GPU."""
    return messages[:, -1].nonzero().flatten().tolist()
