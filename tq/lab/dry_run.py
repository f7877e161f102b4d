"""The bytes of a published layout at its true size, from PyTorch's own code on fake ranks and fake tensors.

One stage of Llama-3 405B (8 layers, TP 8, FSDP 128 as ZeRO-2, PP 16: 16,384 ranks) does a forward and a backward pass
of one micro-batch under ``FakeTensorMode`` and a "fake" process group. Nothing is computed and nothing is sent; what
DTensor and FSDP2 would send is counted where it is dispatched. Edges of the pipeline are not dispatched here: they are
one message a micro-batch and direction.

Source of the layout: Llama Team 2024 (arXiv:2407.21783), table 4 (8K sequences).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

LAYOUT = {"pp": 16, "dp": 128, "tp": 8}
LAYERS, SEQ = 8, 8192


def _config() -> Any:
    from tq.train.model.gpt import GPTConfig

    return GPTConfig(
        layers=LAYERS, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=SEQ, activation="swiglu",
        rope_theta=500000.0,
    )  # fmt: skip


def _stage(config: Any) -> Any:
    """A middle stage: blocks alone. Fake tensors, bf16."""
    import torch
    from torch import nn

    from tq.train.chunks import Chunk
    from tq.train.model.gpt import Block

    empty = torch.empty(config.seq, config.head_size // 2)
    gpt = SimpleNamespace(
        config=SimpleNamespace(layers=LAYERS + 2), embed=None, final_norm=None, head=None, cos=empty, sin=empty,
        blocks=[None, *(Block(config) for _ in range(LAYERS))],
    )  # fmt: skip
    assert isinstance(gpt.blocks[1], nn.Module)
    return Chunk(gpt, 1, LAYERS + 1)  # type: ignore[arg-type]


def _run() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tq.train import tensor
    from tq.train.traffic import counted

    ranks = LAYOUT["pp"] * LAYOUT["dp"] * LAYOUT["tp"]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    mesh = init_device_mesh("cpu", tuple(LAYOUT.values()), mesh_dim_names=tuple(LAYOUT))
    concatenate = DeviceMesh._concatenate

    def real(*given: Any) -> Any:  # meshes are made of real tensors
        with unset_fake_temporarily():
            return concatenate(*given)

    DeviceMesh._concatenate = staticmethod(real)  # type: ignore[method-assign, assignment]
    config = _config()
    torch.set_default_dtype(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        chunk = _stage(config)
        tensor.split(chunk, mesh["tp"], sequence=True, loss_parallel=False)
        for block in chunk.blocks.values():
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(chunk, mesh=mesh["dp"], reshard_after_forward=False)
        x = torch.empty(1, SEQ // LAYOUT["tp"], config.hidden, dtype=torch.bfloat16, requires_grad=True)
        with counted() as traffic:
            out = chunk(x)
            out.backward(torch.empty_like(out))
    return {"sent": traffic.table(), "calls": {f"{k} {n}": c for (k, n), c in traffic.calls.items()}, "ranks": ranks}


def formula() -> dict[str, float]:
    """The same bytes from shapes: bf16, one micro-batch of one sequence, 8 layers."""
    config, tp, dp = _config(), LAYOUT["tp"], LAYOUT["dp"]
    share, shards = (tp - 1) / tp, (dp - 1) / dp
    hidden = 2.0 * SEQ * config.hidden
    attention = config.hidden * config.head_size * (2 * config.heads + 2 * config.groups)
    weights = LAYERS * (attention + 3 * config.hidden * config.ffn_width) / tp
    norms = LAYERS * 2 * config.hidden
    return {
        f"all-gather {tp}": LAYERS * 4 * share * hidden,
        f"reduce-scatter {tp}": LAYERS * 4 * share * hidden,
        f"all-reduce {tp}": 2 * share * 2 * norms,
        f"all-gather {dp}": shards * 2 * (weights + norms),
        f"reduce-scatter {dp}": shards * 2 * (weights + norms),
    }


def dry_run() -> dict[str, Any]:
    """{"sent", "calls", "ranks", "seconds", "formula"}: bytes of a rank in one micro-batch, from a new process."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tq.lab.dry_run"], capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"the dry run failed: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "seconds": time.perf_counter() - began, "formula": formula()}


if __name__ == "__main__":
    print(json.dumps(_run()))
