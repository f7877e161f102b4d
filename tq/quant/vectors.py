"""Vector-search rivals of the codec: exact cosine search over a scalar grid (RaBitQ), product quantization, recall.

For comparison with TurboQuant's claims on nearest neighbours; no index structure, no SIMD scan, nothing is packed.
Sources: RaBitQ (Gao & Long 2024, arXiv:2405.12497) and its multi-bit extension (Gao et al. 2024, arXiv:2409.09913);
product quantization (Jegou, Douze & Schmid 2011).

Shapes: N vectors, d dimension, L levels of the positive half of a symmetric grid, M subspaces of w = d / M dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tq.quant.codebook import lloyd_max
from tq.quant.rotation import derive_seed, rotate, unrotate


def uniform_half(bits: int) -> Tensor:
    """Positive levels 1/2, 3/2, ... of the multi-bit RaBitQ grid, fp32 [2**(bits-1)]."""
    return torch.arange(2 ** (bits - 1), dtype=torch.float32) + 0.5


def lloyd_half(bits: int) -> Tensor:
    """Positive Lloyd-Max levels of N(0, 1), fp32 [2**(bits-1)]."""
    levels, _ = lloyd_max(bits)
    return torch.tensor(levels[levels.size // 2 :], dtype=torch.float32)


def exact_search(z_Nd: Tensor, half_L: Tensor) -> Tensor:
    """The grid point of largest cosine with each row, over *all* scale multipliers: fp32 [N, d], levels with signs.

    As the multiplier t grows from 0, coordinate i steps from level k to k + 1 at t = threshold_k / |z_i|. Sorting
    these d (L - 1) events and summing their increments of <z, q> and |q|^2 visits every code that any t can give.
    """
    rows = max(1, (1 << 21) // (z_Nd.shape[1] * half_L.numel()))  # a few dozen MB of events at a time
    if z_Nd.shape[0] > rows:
        return torch.cat([exact_search(part, half_L) for part in z_Nd.split(rows)])
    magnitude_Nd = z_Nd.abs().double()
    c = half_L.to(z_Nd.device).double()
    thresholds = (c[1:] + c[:-1]) / 2
    n, d = z_Nd.shape
    if c.numel() == 1:
        return torch.where(z_Nd > 0, half_L[0], -half_L[0])
    event_NE = (thresholds / magnitude_Nd.clamp(min=1e-300)[..., None]).view(n, -1)
    dot_NE = (magnitude_Nd[..., None] * (c[1:] - c[:-1])).view(n, -1)
    square_E = (c[1:].square() - c[:-1].square()).repeat(d)
    order_NE = event_NE.argsort(dim=1)
    zero = torch.zeros(n, 1, dtype=torch.float64, device=z_Nd.device)
    dot = magnitude_Nd.sum(1, keepdim=True) * c[0] + torch.cat((zero, dot_NE.gather(1, order_NE).cumsum(1)), dim=1)
    square = d * c[0] ** 2 + torch.cat((zero, square_E[order_NE].cumsum(1)), dim=1)
    best_N = (dot / square.sqrt()).argmax(dim=1)  # number of events that have happened
    rank_NE = torch.empty_like(order_NE).scatter_(1, order_NE, torch.arange(order_NE.shape[1]).expand_as(order_NE))
    level_Nd = (rank_NE < best_N[:, None]).view(n, d, -1).sum(2)
    return torch.where(z_Nd > 0, 1.0, -1.0) * half_L.to(z_Nd.device)[level_Nd]


def unbiased_decode(x_Nd: Tensor, half_L: Tensor, seed: int, kind: str = "haar", search: bool = True) -> Tensor:
    """Rotate rows, code them on the grid, decode with the scale |z|^2 / <z, q> that makes the mean over seeds x.

    With ``uniform_half`` and search this is multi-bit RaBitQ's estimator; with ``lloyd_half`` and no search EDEN's.
    """
    z_Nd = rotate(x_Nd.float(), 1, seed, kind)
    if search:
        q_Nd = exact_search(z_Nd, half_L)
    else:
        unit = z_Nd * (z_Nd.shape[1] ** 0.5 / z_Nd.norm(dim=1, keepdim=True))
        q_Nd = torch.where(z_Nd > 0, 1.0, -1.0) * half_L[torch.bucketize(unit.abs(), (half_L[1:] + half_L[:-1]) / 2)]
    scale_N = z_Nd.square().sum(1) / (z_Nd * q_Nd).sum(1)
    return unrotate(q_Nd * scale_N[:, None], 1, seed, kind)


class ProductQuantizer:
    """k-means codebooks of 256 centroids for each group of ``w`` dimensions: 8 / w bits a coordinate.

    fit: Lloyd's k-means from ``iterations`` sweeps, started from distinct samples drawn by the seed; an empty cluster
    keeps its centroid. Data-dependent, unlike all else here: it has to see the vectors first.
    """

    def __init__(self, width: int, iterations: int = 10, seed: int = 0) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1 dimension, got {width}")
        self.width, self.iterations, self.seed = width, iterations, seed

    def fit(self, x_Nd: Tensor) -> ProductQuantizer:
        n, d = x_Nd.shape
        if d % self.width or n < 256:
            raise ValueError(
                f"needs at least 256 vectors of a dimension that {self.width} divides, got {tuple(x_Nd.shape)}"
            )
        groups_MNw = x_Nd.float().view(n, -1, self.width).transpose(0, 1).contiguous()
        pick = np.random.Generator(np.random.Philox(derive_seed(self.seed, "pq"))).choice(n, 256, replace=False)
        self.centroids_MKw = groups_MNw[:, torch.from_numpy(pick)].clone()
        for _ in range(self.iterations):
            for m, points in enumerate(groups_MNw):
                index = self._nearest(points, self.centroids_MKw[m])
                count = torch.bincount(index, minlength=256).float()
                total = torch.zeros(256, self.width).index_add_(0, index, points)
                self.centroids_MKw[m] = torch.where(
                    count[:, None] > 0, total / count.clamp(min=1)[:, None], self.centroids_MKw[m]
                )
        return self

    @staticmethod
    def _nearest(points_Nw: Tensor, centroids_Kw: Tensor) -> Tensor:
        return (centroids_Kw.square().sum(1) - 2 * points_Nw @ centroids_Kw.T).argmin(1)

    def roundtrip(self, x_Nd: Tensor) -> Tensor:
        """Encode and decode rows, fp32 [N, d]."""
        groups = x_Nd.float().view(x_Nd.shape[0], -1, self.width)
        parts = [c[self._nearest(groups[:, m], c)] for m, c in enumerate(self.centroids_MKw)]
        return torch.cat(parts, dim=1)


def recall_1_at_k(base_Nd: Tensor, decoded_Nd: Tensor, query_Qd: Tensor, ks: tuple[int, ...]) -> dict[int, float]:
    """Share of queries whose exact largest inner product is among the k largest approximate ones (the paper's 1@k)."""
    best_Q1 = (query_Qd @ base_Nd.T).argmax(dim=1, keepdim=True)
    found = (query_Qd @ decoded_Nd.T).topk(max(ks), dim=1).indices == best_Q1
    return {k: float(found[:, :k].any(dim=1).double().mean()) for k in ks}
