"""Weights of a streamed run as a safetensors file, written a layer at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from tq.train.stream.trainer import StreamedTrainer
from tq.train.tqk.disk import durable


def save(trainer: StreamedTrainer, path: Path) -> None:
    """Writes all weights in fp32 under the names of ``GPT``, whole or not at all.

    ``GPT.load_state_dict`` takes them; a tied head is the embedding's. Raises OSError for a disk that is full or gone.
    """
    header: dict[str, dict[str, object]] = {}
    at = 0
    for name, shape in trainer.model.named_shapes():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + 4 * shape.numel()]}
        at += 4 * shape.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for _, x in trainer.weights():
            yield memoryview(x.numpy().data).cast("B")

    durable(path.resolve(), parts())
