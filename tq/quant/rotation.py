"""Seeds, random signs and orthogonal rotations of blocks.

A rotation of one block of ``B`` numbers is either ``rounds`` products ``(1/sqrt(B)) H D`` (Sylvester-Hadamard matrix
``H``, random signs ``D`` applied *before* it) or one dense Haar-distributed orthogonal matrix. Everything random comes
from a counter hash of the seed: no generator of torch or NumPy is drawn from or changed, so a resumed run repeats
its bits. Refused: a Hadamard rotation of a length that is not a power of two; learned rotations.

Shapes: N blocks, B block size, R rounds.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


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


def is_power_of_two(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


@lru_cache(maxsize=4096)
def signs(block: int, rounds: int, seed: int, device: str = "cpu") -> Tensor:
    """Random signs of a Hadamard rotation: float32 [R, B] of +1 and -1. Cached: do not write into it."""
    bits = _hash_stream(derive_seed(seed, "signs", block), rounds * block) >> np.uint64(63)
    table = 1.0 - 2.0 * bits.astype(np.float32).reshape(rounds, block)
    return torch.from_numpy(table).to(device)


@lru_cache(maxsize=16)
def haar(dim: int, seed: int, device: str = "cpu") -> Tensor:
    """Haar-distributed orthogonal matrix, float64 [B, B]. Cached: do not write into it.

    QR of a Gaussian matrix with the signs of R's diagonal moved into Q; without that the law of Q depends on the
    QR convention (Mezzadri 2007, "How to generate random matrices from the classical compact groups").
    """
    q, r = np.linalg.qr(_normals(derive_seed(seed, "haar", dim), (dim, dim)))
    return torch.from_numpy(np.ascontiguousarray(q * np.sign(np.diagonal(r)))).to(device)


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
