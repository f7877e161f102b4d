"""What a simulated GPU has to find, and what it must not: each case is run by ``test_simulated_gpu`` in one child."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tq import Codec
from tq.infer.direct import DirectLinear
from tq.lab import gpu_paths
from tq.lab.simulated_gpu import SimulatedGPU, SimulatedTensor, plain
from tq.lab.simulated_torch import simulate
from tq.train.model import GPT, GPTConfig
from tq.train.optim import TurboQuantAdamW

CODEC = Codec(4, 128, nonfinite="propagate")


def kinds(gpu: SimulatedGPU) -> list[str]:
    found = [problem.kind for problem in gpu.problems]
    gpu.reset()
    return found


def an_item(gpu: SimulatedGPU) -> None:
    x = torch.ones(8, device="cuda")
    assert kinds(gpu) == []
    for ask in (lambda: x.sum().item(), lambda: bool(x[0] > 0), lambda: x.tolist(), x.cpu, x.nonzero, lambda: x[x > 0]):
        ask()
        assert "waits" in kinds(gpu), ask


def a_wait_of_the_host(gpu: SimulatedGPU) -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    event.record(stream)
    assert kinds(gpu) == []
    for ask in (stream.synchronize, event.synchronize, torch.cuda.synchronize):
        ask()
        assert kinds(gpu) == ["waits"]


def a_wrong_stream(gpu: SimulatedGPU) -> None:
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    x += 1
    with torch.cuda.stream(side):
        y = x * 2
    assert kinds(gpu) == ["order"]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 3
    assert kinds(gpu) == []
    y += 1  # the way back is not awaited
    assert kinds(gpu) == ["order"]


def a_missing_wait(gpu: SimulatedGPU) -> None:
    x, side, event = torch.ones(8, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x += 1
        event.record()
        x += 1  # behind the event
    event.wait()
    x * 2
    assert kinds(gpu) == ["order"]
    torch.cuda.current_stream().wait_stream(side)
    x * 2
    assert kinds(gpu) == []


def two_readers(gpu: SimulatedGPU) -> None:
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    x + 1
    with torch.cuda.stream(side):
        x + 2
    assert kinds(gpu) == []
    x += 1  # while the other may read
    assert kinds(gpu) == ["order"]


def kernels_on_two_streams(gpu: SimulatedGPU) -> None:
    x, side = torch.randn(256, device="cuda"), torch.cuda.Stream()
    CODEC.encode(x)  # tables are made
    kinds(gpu)
    x += 1
    with torch.cuda.stream(side):
        code = CODEC.encode(x)
    assert "order" in kinds(gpu)
    torch.cuda.current_stream().wait_stream(side)
    CODEC.decode(code)
    assert kinds(gpu) == []


def a_tensor_of_the_host(gpu: SimulatedGPU) -> None:
    x = torch.ones(8, device="cuda")
    x * torch.tensor(2.0)  # a number
    assert kinds(gpu) == []
    x * torch.ones(8)
    assert kinds(gpu) == ["place"]
    x[torch.tensor([1, 2])]
    assert "place" in kinds(gpu)


def copies(gpu: SimulatedGPU) -> None:
    x, page_locked = torch.ones(8, device="cuda"), torch.empty(8, pin_memory=True)
    for queued, host in ((True, page_locked), (False, page_locked), (True, torch.empty(8))):
        x.copy_(host, non_blocking=queued)
        host.copy_(x, non_blocking=queued)
        assert kinds(gpu) == ([] if queued and host is page_locked else ["waits", "waits"])
    torch.ones(8).to("cuda")
    assert kinds(gpu) == ["waits"]
    torch.ones(8).pin_memory().to("cuda", non_blocking=True)
    assert kinds(gpu) == []


def memory_given_back_too_early(gpu: SimulatedGPU) -> None:
    side = torch.cuda.Stream()

    def use(recorded: bool) -> None:
        x = torch.ones(1000, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 2
            if recorded:
                x.record_stream(side)
        del x
        torch.ones(8, device="cuda")

    use(recorded=False)
    assert kinds(gpu) == ["freed"]
    torch.cuda.current_stream().wait_stream(side)
    use(recorded=True)
    assert kinds(gpu) == []


def views_and_empties_are_no_launches(gpu: SimulatedGPU) -> None:
    x = torch.empty(8, 8, device="cuda")
    x.view(64)[3:], x.T, x.detach(), torch.empty_like(x), x.new_empty(3)
    assert sum(gpu.launches.values()) == 0
    x.zero_()
    assert dict(gpu.launches) == {"zero_": 1}


def results_are_those_of_a_cpu(gpu: SimulatedGPU) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    there, here = (CODEC.decode(CODEC.encode(y)) for y in (x.cuda(), x))
    assert isinstance(there, SimulatedTensor) and there.device.type == "cuda"
    torch.testing.assert_close(plain(there), here, rtol=1e-3, atol=1e-4)


def a_model_trains(gpu: SimulatedGPU) -> None:
    torch.manual_seed(0)
    models = [GPT(GPTConfig(layers=1, hidden=64, heads=1, vocab=32, seq=16), seed=0) for _ in range(2)]
    ids, losses = torch.randint(32, (2, 16)), []
    for model, device in zip(models, ("cuda", "cpu"), strict=True):
        model.to(device)
        optimizer = TurboQuantAdamW(model.parameters(), lr=1e-2, state=None, variant="local")
        for _ in range(3):
            loss = model(ids.to(device))[0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(plain(loss)))
    assert abs(losses[0] - losses[1]) < 1e-4 * losses[1], losses
    assert {"order", "place", "freed"}.isdisjoint(kinds(gpu))


def nothing_else_is_written(gpu: SimulatedGPU) -> None:
    """What is said to be read is the same afterwards, whatever is launched."""
    held: list[tuple[str, Tensor, Tensor]] = []
    launch = SimulatedGPU.launch

    def compare() -> None:
        for name, tensor, before in held:
            assert torch.equal(plain(tensor), before), name
        held.clear()

    def noted(self: SimulatedGPU, name: str, read: list[Tensor], written: list[Tensor], *rest: object) -> None:
        compare()
        if name.startswith("gpu"):
            outputs = {plain(x).untyped_storage().data_ptr() for x in written}
            kept = [plain(x) for x in read if plain(x).untyped_storage().data_ptr() not in outputs]
            held.extend((name, x, x.clone()) for x in kept)
        launch(self, name, read, written, *rest)  # type: ignore[arg-type]

    with patch.object(SimulatedGPU, "launch", noted):
        for state in (None, (4, 8)):
            weights = [torch.nn.Parameter(torch.randn(200, device="cuda")) for _ in range(2)]
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer = TurboQuantAdamW(weights, lr=1e-2, state=state, **gpu_paths.CAPTURABLE)
            for _ in range(2):
                optimizer.step()
        CODEC.decode(CODEC.encode(torch.randn(300, device="cuda")))
        compare()


def products_from_codes(gpu: SimulatedGPU) -> None:
    """One vector is multiplied straight from codes, nine are not; both as on a CPU."""
    layer = DirectLinear(Codec(4, 64, scale_dtype=torch.bfloat16).encode(torch.randn(10, 100), rows=True))
    there = DirectLinear(layer.code)
    for name in ("payload", "scales"):
        setattr(there, name, getattr(layer, name).cuda())
    for vectors in (1, 9):
        x = torch.randn(vectors, 100)
        gpu.reset()
        found = there(x.cuda())
        assert ("gpu_codes._product_kernel" in gpu.launches) == (vectors == 1)
        torch.testing.assert_close(plain(found), layer(x), rtol=1e-3, atol=1e-3)
        assert "place" not in kinds(gpu)


def a_collective_that_nobody_waits_for(gpu: SimulatedGPU) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(8, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        x * 2
        assert kinds(gpu) == ["order"]
        work.wait()
        x * 2
        assert kinds(gpu) == []
    finally:
        dist.destroy_process_group()


CASES: dict[str, Callable[[SimulatedGPU], None]] = {
    case.__name__: case
    for case in (
        an_item, a_wait_of_the_host, a_wrong_stream, a_missing_wait, two_readers, kernels_on_two_streams,
        a_tensor_of_the_host, copies, memory_given_back_too_early, views_and_empties_are_no_launches,
        results_are_those_of_a_cpu, a_model_trains, nothing_else_is_written,
        products_from_codes, a_collective_that_nobody_waits_for,
    )
}  # fmt: skip


def main() -> None:
    """A line of JSON for each case: its name, and a traceback or null."""
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name, case in CASES.items():
        problem = None
        try:
            with simulate() as gpu:
                case(gpu)
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps([name, problem]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
