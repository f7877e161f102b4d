"""One rank of a model in shards (FSDP2), saved by four ranks and loaded by 2, 1, 3 and 4: python reshard.py FOLDER."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tq.train.tqk.dcp import Reader, Writer


def whole(state):
    """All tensors of a nested state, gathered."""
    if hasattr(state, "full_tensor"):
        return state.full_tensor()
    if isinstance(state, dict):
        return {str(key): whole(each) for key, each in state.items()}
    return state


def rank_of(rank: int, folder: str, ranks: int, act: str) -> None:
    store = dist.FileStore(f"{folder}/store-{act}-{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0 if act == "save" else 1)
    model = nn.Sequential(nn.Linear(37, 101), nn.ReLU(), nn.Linear(101, 5, bias=False), nn.LayerNorm(5))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        model(torch.randn(8, 37)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optim": moments, "step": 3 if act == "save" else 0}
    if act == "save":
        for _ in range(2):  # the same folder twice
            dcp.save(state, storage_writer=Writer(f"{folder}/checkpoint"))
    else:
        dcp.load(state, storage_reader=Reader(f"{folder}/checkpoint"))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        state["model"], state["optim"] = get_state_dict(model, optimizer)
    found = whole(state)
    if rank == 0:
        torch.save(found, f"{folder}/{act}-{ranks}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for ranks, act in ((4, "save"), (2, "load"), (1, "load"), (3, "load"), (4, "load")):
        mp.start_processes(rank_of, (sys.argv[1], ranks, act), nprocs=ranks, start_method="fork")
