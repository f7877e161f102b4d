"""Seeds, random signs and orthogonal rotations of blocks.

A rotation of one block of ``B`` numbers is either ``rounds`` products ``(1/sqrt(B)) H D`` (Sylvester-Hadamard matrix
``H``, random signs ``D`` applied *before* it) or one dense Haar-distributed orthogonal matrix. Everything random comes
from counters and the seed: no generator of torch or NumPy is drawn from or changed, so a resumed run repeats its bits.
What changes with every step (signs, dither, the seed of a step) comes from Philox, which kernels on any device compute
for themselves. Refused: a Hadamard rotation of a length that is not a power of two; learned rotations.

Shapes: N blocks, B block size, R rounds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tq.quant.memory import memory_range

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_WORD = (1 << 32) - 1
SIGNS, STEP, DITHER, WEIGHTS = 1, 2, 3, 4  # last word of Philox's counter: what its numbers are for


def _mix(x: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea & Flood 2014): a bijection of 64-bit integers that avalanches."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def derive_seed(seed: int, *keys: int | str) -> int:
    """Seed in [0, 2**64) for the stream named by ``keys`` (step, tensor, rank, ...) under a global ``seed``.

    Order and count of the keys matter; a string key is hashed by its UTF-8 bytes. The value depends on nothing else
    (not on the process, the platform or Python's hash randomisation), so a restarted job derives the same seeds.
    """
    state = _mix((int(seed) + _GOLDEN) & _MASK)
    for key in keys:
        if isinstance(key, str):
            words = [int.from_bytes(key.encode()[i : i + 8], "little") for i in range(0, len(key.encode()), 8)]
            words = [*words, len(key.encode()) + (1 << 63)]  # length closes the string: "a", "" differs from "", "a"
        else:
            words = [int(key) & _MASK]
        for word in words:
            state = _mix((state + _GOLDEN + _mix(word)) & _MASK)
    return state


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 random bits for each counter of four words, under a seed of 64 bits: Philox-4x32-10.

    counter: ints, int64 arrays or int64 tensors of words in [0, 2**32) that broadcast; so are the words returned.
    Source: Salmon, Moraes, Dror & Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    a, b, c, d = counter
    low, high = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57  # in int64 they wrap around, which spoils no bit of the two halves
        a, b, c, d = (q >> 32 & _WORD) ^ b ^ low, q & _WORD, (p >> 32 & _WORD) ^ d ^ high, p & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    return a, b, c, d


def step_seed(seed: int, step: int) -> int:
    """The seed in [0, 2**64) of step number ``step`` >= 0 under ``seed``: one Philox call, which a kernel can make."""
    low, high, _, _ = philox((step & _WORD, step >> 32 & _WORD, 0, STEP), seed)
    return low | high << 32


def dither(seed: int, count: int, device: torch.device | str = "cpu", use: int = DITHER) -> Tensor:
    """int32 [count]: uniform in [0, 2**16), for rounding at random. use: DITHER or WEIGHTS.

    Number 16 j + l of a run of 128 is the lower (j even) or upper half of word j // 2 for the counter 16 * run + l: 16
    lanes make the 128 without an exchange.
    """
    runs = -(-count // 128)
    at = torch.arange(16 * runs, device=device)
    words = philox((at & _WORD, at >> 32, torch.zeros_like(at), torch.full_like(at, use)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves).to(torch.int32).view(8, runs, 16).permute(1, 0, 2).reshape(-1)[:count]


def _hash_stream(seed: int, count: int) -> np.ndarray:
    """uint64 [count]: SplitMix64's output for counters 1..count."""
    with np.errstate(over="ignore"):
        x = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _normals(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """float64 standard normals by Box-Muller on the hash stream (53-bit uniforms in (0, 1))."""
    count = int(np.prod(shape))
    half = (count + 1) // 2
    u = (np.right_shift(_hash_stream(seed, 2 * half), np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2.0 * np.log(u[:half])), 2.0 * np.pi * u[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count].reshape(shape)


def _kept(table: Tensor) -> Tensor:
    """The table, which a cache may keep: no tensor of a tracer, which would come back in another's calls."""
    memory_range("rotation", table)
    return table


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@lru_cache(maxsize=4096)
def signs(block: int, rounds: int, seed: int, device: str = "cpu") -> Tensor:
    """Random signs of a Hadamard rotation: float32 [R, B] of +1 and -1. Cached: do not write into it."""
    at, zeros = np.arange(-(-rounds * block // 128)), np.zeros(-(-rounds * block // 128), np.int64)
    words = np.stack(philox((at, zeros + block, zeros, zeros + SIGNS), seed), axis=1)
    bits = words[:, :, None] >> np.arange(32) & 1  # sign i is bit i % 32 of word i % 128 // 32 for counter i // 128
    table = 1.0 - 2.0 * bits.reshape(-1)[: rounds * block].astype(np.float32).reshape(rounds, block)
    return _kept(torch.from_numpy(table).to(device))


@lru_cache(maxsize=16)
def haar(dim: int, seed: int, device: str = "cpu") -> Tensor:
    """Haar-distributed orthogonal matrix, float64 [B, B]. Cached: do not write into it.

    QR of a Gaussian matrix with the signs of R's diagonal moved into Q; without that the law of Q depends on the
    QR convention (Mezzadri 2007, "How to generate random matrices from the classical compact groups").
    """
    q, r = np.linalg.qr(_normals(derive_seed(seed, "haar", dim), (dim, dim)))
    return _kept(torch.from_numpy(np.ascontiguousarray(q * np.sign(np.diagonal(r)))).to(device))


def hadamard_transform(x: Tensor) -> Tensor:
    """Orthonormal Walsh-Hadamard transform (1/sqrt(B)) H x over the last dimension, in log2(B) butterfly stages.

    x: [..., B], floating point, B a power of two. Returns a new tensor of the same shape and dtype.
    Butterflies rather than a matrix product: the result then does not depend on global matmul-precision settings.
    """
    block = x.shape[-1]
    if not is_power_of_two(block):
        raise ValueError(f"the Hadamard transform needs a power of two, got a last dimension of {block}")
    y = x.reshape(-1, block)
    half = 1
    while half < block:
        pairs = y.view(-1, block // (2 * half), 2, half)  # [N, B/2h, 2, h]
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        y = torch.stack((a + b, a - b), dim=2).view(-1, block)
        half *= 2
    return (y * block**-0.5).view(x.shape)


def rotate(x: Tensor, rounds: int = 1, seed: int = 0, kind: str = "hadamard") -> Tensor:
    """Rotate every row of ``x`` [N, B] float32 by the orthogonal matrix that (B, rounds, seed, kind) names."""
    if kind == "haar":
        return (x.double() @ haar(x.shape[-1], seed, str(x.device)).T).to(x.dtype)
    sign_RB = signs(x.shape[-1], rounds, seed, str(x.device))
    for r in range(rounds):
        x = hadamard_transform(x * sign_RB[r])
    return x


def unrotate(z: Tensor, rounds: int = 1, seed: int = 0, kind: str = "hadamard") -> Tensor:
    """Inverse (= transpose) of ``rotate`` for rows ``z`` [N, B] float32."""
    if kind == "haar":
        return (z.double() @ haar(z.shape[-1], seed, str(z.device))).to(z.dtype)
    sign_RB = signs(z.shape[-1], rounds, seed, str(z.device))
    for r in reversed(range(rounds)):
        z = hadamard_transform(z) * sign_RB[r]
    return z
