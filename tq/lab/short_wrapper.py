"""A lossless checkpoint wrapper of some thirty lines, as a document says it takes: byte planes under Huffman codes."""

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


def save(path: Path, state: dict[str, Tensor]) -> None:
    """Write fp32 tensors, losslessly compressed."""
    said, parts = [], []
    for name, tensor in state.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}, not torch.float32")
        bits = tensor.detach().contiguous().view(torch.int32).numpy().view(np.uint32).reshape(-1)
        planes = (bits << 1 | bits >> 31).view(np.uint8).reshape(-1, 4).T  # the last one is the exponent
        squeezed = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
        exponent = squeezed.compress(planes[3].tobytes()) + squeezed.flush()
        said.append([name, list(tensor.shape), len(exponent)])
        parts += [exponent, planes[:3].tobytes()]
    head = json.dumps(said).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))


def load(path: Path) -> dict[str, Tensor]:
    """The tensors that ``save`` wrote."""
    content, state = path.read_bytes(), {}
    at = 8 + int.from_bytes(content[:8], "little")
    for name, shape, size in json.loads(content[8:at]):
        count = int(np.prod(shape, dtype=np.int64))
        rest = np.frombuffer(content, np.uint8, 3 * count, at + size).reshape(3, count)
        exponent = np.frombuffer(zlib.decompress(content[at : at + size]), np.uint8)
        bits = np.ascontiguousarray(np.vstack([rest, exponent[None]]).T).view(np.uint32).reshape(-1)
        state[name] = torch.from_numpy((bits >> 1 | bits << 31).view(np.float32).reshape(shape))
        at += size + 3 * count
    return state


def lines() -> int:
    """Lines of this module up to here, without blank ones and docstrings."""
    text = Path(__file__).read_text(encoding="utf-8").split("def lines")[0]
    return sum(bool(line.strip()) and not line.strip().startswith('"""') for line in text.splitlines())
