"""What PyTorch's own operators hold, counted at a small size: the two constants of memory that no paper prints."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)  # fmt: skip
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tq.systems import Layout, Transformer, memory
from tq.systems.efficiency import software_facts
from tq.systems.memory import activation_bytes

TP, TOKENS, HIDDEN, VOCAB = 8, 64, 32, 8192
FSDP = software_facts("fsdp").memory


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Eight ranks of which only the first exists: its collectives return memory of the right size."""
    dist.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    yield init_device_mesh("cpu", (TP,))
    dist.destroy_process_group()


class Blocks(TorchDispatchMode):
    """Blocks that a caching allocator takes for tensors of one number of elements: a freed block is used again by what
    fits into it, and is never given back."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.free, self.taken, self.seen = elements, [], 0, set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back with the local tensors
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            # a sharding is looked up with a fake tensor of the whole size, which has no memory
            real = isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor)
            if real and tensor.numel() == self.elements and tensor.untyped_storage()._cdata not in self.seen:
                self._take(tensor.untyped_storage())
        return found

    def _take(self, storage: Any) -> None:
        size, key = storage.nbytes(), storage._cdata
        fits = [block for block in self.free if block >= size]
        block = min(fits, default=size)
        if fits:
            self.free.remove(block)
        else:
            self.taken += size
        self.seen.add(key)

        def freed() -> None:
            self.free.append(block)
            self.seen.discard(key)

        weakref.finalize(storage, freed)


@pytest.mark.parametrize("parallel", [False, True])
def test_the_loss_takes_the_bytes_of_the_model(mesh: DeviceMesh, parallel: bool) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.output = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.output(x)

    head, tp = Head(), TP if parallel else 1
    if parallel:
        plan = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(head, mesh, {"output": plan})
    x = torch.randn(1, TOKENS // tp, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(VOCAB, (TOKENS,))
    elements = TOKENS * VOCAB // tp
    with loss_parallel() if parallel else contextlib.nullcontext(), Blocks(elements) as blocks:
        logits = head(x)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), target)
        del logits
        loss.backward()
    per_logit = blocks.taken / elements

    model = Transformer(2, HIDDEN, TP, VOCAB, TOKENS, tied=False)
    wider = Transformer(2, HIDDEN, TP, 2 * VOCAB, TOKENS, tied=False)
    small, large = (memory(each, Layout(tp=tp, sequence_parallel=parallel), **FSDP).working for each in (model, wider))
    assert (large - small) / elements == pytest.approx(per_logit) and per_logit in (14.0, 18.0)


def test_dtensor_keeps_the_gathered_inputs_of_products(mesh: DeviceMesh) -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(HIDDEN, dtype=torch.bfloat16)
            self.up = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False, dtype=torch.bfloat16)
            self.down = nn.Linear(4 * HIDDEN, HIDDEN, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(self.norm(x))))

    mlp = Mlp()
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(mlp, mesh, plan)
    gathered: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.numel() == TOKENS * HIDDEN:
            gathered.append(local.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mlp(torch.randn(1, TOKENS // TP, HIDDEN, dtype=torch.bfloat16, requires_grad=True))
    counted = sum(gathered)
    assert counted == 2 * TOKENS * HIDDEN

    # a layer has two such products; the model splits their inputs without DTensor and keeps them whole with it
    layout = Layout(tp=TP, sequence_parallel=True)
    model = Transformer(2, HIDDEN, 8, VOCAB, TOKENS)
    split, whole = (activation_bytes(model, layout, flash=True, dtensor=each)[0] for each in (False, True))
    assert whole - split == pytest.approx(2 * counted * (1 - 1 / TP))


def test_without_tensor_parallelism_nothing_changes() -> None:
    model = Transformer.preset("llama2-7b")
    plain, dtensor = (memory(model, Layout(), dtensor=each, loss_bytes=14.0) for each in (False, True))
    assert plain == dtensor
