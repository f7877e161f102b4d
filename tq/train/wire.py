"""A tensor as a message in a few bits: what travels between two ranks that know its shape, its key and its codec."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tq.quant.codec import Codec
from tq.train.comm.layout import Key, message_bytes, new_messages, seeded, view_code


def nbytes(codec: Codec, numel: int) -> int:
    """Bytes of the message that carries so many elements."""
    return message_bytes(codec, -(-numel // codec.block))


def pack(x: Tensor, codec: Codec, key: Key) -> Tensor:
    """The message, uint8 [bytes]. ``key``: (step, names...), on sender and receiver the same, and never used twice."""
    blocks, flat = -(-x.numel() // codec.block), x.detach().contiguous().view(-1)
    codec = replace(codec, nonfinite="propagate")
    message = new_messages(1, message_bytes(codec, blocks), x.device)[0]
    codec = seeded(codec, key)
    codec.encode(flat, view_code(codec, message, blocks, flat.numel(), flat.dtype))
    return message


def unpack(message: Tensor, out: Tensor, codec: Codec, key: Key) -> None:
    """Decodes a message into ``out``, which is contiguous: the same bits on every rank."""
    blocks = -(-out.numel() // codec.block)
    codec = seeded(replace(codec, nonfinite="propagate"), key)
    codec.decode(view_code(codec, message, blocks, out.numel(), out.dtype), out=out.view(-1))


def there_and_back(x: Tensor, codec: Codec, key: Key) -> Tensor:
    """What a receiver reads of x: a new tensor."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    unpack(pack(x, codec, key), out, codec, key)
    return out
