"""An all-gather and an all-to-all of codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor

from tq.quant.codec import Codec
from tq.train.comm.agreement import Attempt, Request, check_consistent, guarded
from tq.train.comm.channels import all_gather, channel_of
from tq.train.comm.layout import message_bytes, new_messages, seeded, view_code


def _exchange(
    rows: Sequence[Tensor], output: Tensor, codec: Codec, key: int, group: dist.ProcessGroup,
    send: Callable[[Tensor, Tensor], object],
) -> Tensor:  # fmt: skip
    """Encode rows, let ``send(received, sent)`` carry their messages, decode what came into equal parts of output."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    numel, channel = rows[0].numel(), channel_of(group)
    blocks, codecs = -(-numel // codec.block), [seeded(codec, (key,), 1, r) for r in range(ranks)]
    sent = new_messages(len(rows), message_bytes(codec, blocks), output.device)
    received = sent.new_empty(ranks, sent.shape[1])

    def encode() -> None:
        for row, message in zip(rows, sent, strict=True):
            codecs[rank].encode(row, view_code(codecs[rank], message, blocks, numel, row.dtype))

    def decode() -> None:
        for part, chosen, message in zip(output.view(ranks, numel), codecs, received, strict=True):
            chosen.decode(view_code(chosen, message, blocks, numel, part.dtype), out=part)

    asked = Request(f"a coded exchange of {len(rows)}", (codec,), ((numel, output.dtype),), ((key,),))
    with Attempt(channel) as attempt:
        check_consistent(asked, output.device, channel)
        attempt.make(encode, sent)
        with guarded(channel):
            send(received, sent)
        attempt.look(received)
        attempt.make(decode)
    return output


def gather_codes(output: Tensor, given: Tensor, codec: Codec, key: int, group: dist.ProcessGroup) -> Tensor:
    """An all-gather: every rank, the sender included, has what the code of each part decodes to.

    Args:
        output: contiguous, of as many equal parts as there are ranks.
        given: this rank's part.
        codec: of what is sent.
        key: selects the seed.
        group: of the ranks.
    """

    def send(received: Tensor, sent: Tensor) -> None:
        all_gather(received.view(-1), sent.view(-1), group=group)

    return _exchange([given.reshape(-1)], output, codec, key, group, send)


def scatter_codes(output: Tensor, given: Tensor, codec: Codec, key: int, group: dist.ProcessGroup) -> Tensor:
    """An all-to-all of equal parts; what a rank sends itself is coded too, as for the others.

    Args:
        output: contiguous, of as many equal parts as there are ranks.
        given: as many parts, one for each rank.
        codec: of what is sent.
        key: selects the seed.
        group: of the ranks.
    """
    rows = list(given.reshape(dist.get_world_size(group), -1))
    return _exchange(rows, output, codec, key, group, partial(dist.all_to_all_single, group=group))
