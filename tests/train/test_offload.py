"""A state that lies elsewhere gives the same weights, never crowds the device, and says so when it is lost."""

from __future__ import annotations

import copy
import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tq.train import offload
from tq.train.offload import ALIGN, DEPTH, PAGE, OffloadedAdamW, Scratch, aligned
from tq.train.optim import TurboQuantAdamW

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
PLACES = ["host", "files"]


def layers(device: str = "cpu", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    sizes = (24, 40, 40, 40, 8)
    return nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)]).to(device)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    device = next(model.parameters()).device
    for k in range(start, start + steps):
        generator = torch.Generator().manual_seed(k)
        optimizer.zero_grad()
        model(torch.randn(16, 24, generator=generator).to(device)).square().mean().backward()
        optimizer.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def made(model: nn.Module, place: str, tmp_path: Path, **options: Any) -> OffloadedAdamW:
    options = {"lr": 1e-2, "bucket_elements": 1000, **options}
    return OffloadedAdamW(model.parameters(), place="host" if place == "host" else tmp_path, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("state", [None, (4, 8), (8, 4)])
@pytest.mark.parametrize("variant", offload.VARIANTS)
def test_the_weights_are_those_of_a_state_that_stays(
    device: str, place: str, state: tuple[int, int] | None, variant: str, tmp_path: Path
) -> None:
    ours, theirs = layers(device), layers(device)
    optimizer = made(ours, place, tmp_path, state=state, variant=variant, max_norm=1.0)
    plain = TurboQuantAdamW(
        theirs.parameters(), lr=1e-2, bucket_elements=1000, state=state, variant=variant, max_norm=1.0
    )
    train(ours, optimizer, 6)
    train(theirs, plain, 6)
    assert len(optimizer._stores[0]) > DEPTH  # more buckets than may be under way
    assert same(ours, theirs)
    optimizer.flush()
    assert optimizer.state_nbytes == plain.state_nbytes > 0
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        for x, y in zip(optimizer.moments(p), plain.moments(q), strict=True):
            assert x.device.type == "cpu" and torch.equal(x, y.cpu())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("state", [None, (4, 8)])
def test_states_go_from_one_to_the_other_through_a_file(
    device: str, place: str, state: tuple[int, int] | None, tmp_path: Path
) -> None:
    first, second, third = (layers(device) for _ in range(3))
    stays = TurboQuantAdamW(first.parameters(), lr=1e-2, bucket_elements=1000, state=state)
    train(first, stays, 3)

    def through_a_file(value: dict[str, Any]) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=True)

    second.load_state_dict(first.state_dict())
    moved = made(second, place, tmp_path, state=state)
    moved.load_state_dict(through_a_file(stays.state_dict()))
    train(first, stays, 3, start=3)
    train(second, moved, 3, start=3)
    assert same(first, second)
    saved = io.BytesIO()
    torch.save(moved.state_dict(), saved)
    assert saved.getbuffer().nbytes < moved.state_nbytes + 20_000  # what is there, and nothing beside it
    third.load_state_dict(second.state_dict())
    back = TurboQuantAdamW(third.parameters(), lr=1e-2, bucket_elements=1000, state=state)
    back.load_state_dict(through_a_file(moved.state_dict()))
    train(second, moved, 2, start=6)
    train(third, back, 2, start=6)
    assert same(second, third)


@pytest.mark.parametrize("place", PLACES)
def test_it_goes_on_from_its_own_state_of_before(place: str, tmp_path: Path) -> None:
    whole, broken = layers(), layers()
    train(whole, made(whole, place, tmp_path), 5)
    optimizer = made(broken, place, tmp_path)
    train(broken, optimizer, 2)
    weights, state = copy.deepcopy(broken.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(broken, optimizer, 2, start=2)
    broken.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(broken, optimizer, 3, start=2)
    assert same(whole, broken)


@pytest.mark.parametrize("place", PLACES)
def test_adamws_state_is_taken_over(place: str, tmp_path: Path) -> None:
    ours, theirs = layers(), layers()
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    train(theirs, adamw, 3)
    ours.load_state_dict(theirs.state_dict())
    optimizer = made(ours, place, tmp_path, variant="exact")
    optimizer.load_state_dict(adamw.state_dict())
    train(theirs, adamw, 3, start=3)
    train(ours, optimizer, 3, start=3)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_host_memory_beside_files_is_that_of_a_few_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def counted(nbytes: int, pin: bool = False) -> torch.Tensor:
        taken.append(nbytes)
        return aligned(nbytes, pin)

    monkeypatch.setattr(offload, "aligned", counted)
    weights = [nn.Parameter(torch.randn(4096)) for _ in range(20)]
    optimizer = OffloadedAdamW(weights, place=tmp_path, bucket_elements=4096)
    for _ in range(4):
        for w in weights:
            w.grad = torch.ones_like(w)
        optimizer.step()
    optimizer.flush()
    assert optimizer.state_nbytes == 20 * 8 * 4096
    assert sum(taken) <= (DEPTH + 1) * 8 * 4096  # whatever the number of buckets and steps


def test_pieces_of_a_slab_lie_apart_on_pages() -> None:
    slabs = offload.Slabs(pin=torch.cuda.is_available())
    sizes = [PAGE, 3 * PAGE, offload.SLAB // 2, offload.SLAB // 2, 2 * offload.SLAB + PAGE, PAGE]
    pieces = [slabs.take(size) for size in sizes]
    assert [piece.nbytes for piece in pieces] == sizes and all(piece.data_ptr() % PAGE == 0 for piece in pieces)
    spans = sorted((piece.data_ptr(), piece.data_ptr() + piece.nbytes) for piece in pieces)
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    held = {piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in pieces}
    assert len(held) == 3  # the first two share one with the third; the fourth found no room, nor did the fifth


def test_a_gradient_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    model, other = layers(), layers()
    optimizer, reference = made(model, "files", tmp_path), made(other, "files", tmp_path)
    train(model, optimizer, 2)
    train(other, reference, 2)
    next(model.parameters()).grad.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="parameter 0"):
        optimizer.step()
    assert same(model, other)
    train(model, optimizer, 2, start=2)
    train(other, reference, 2, start=2)
    assert same(model, other)


def test_a_full_disk_is_told_and_a_loaded_state_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, model = layers(), layers()
    train(whole, made(whole, "files", tmp_path), 4)
    optimizer = made(model, "files", tmp_path)
    train(model, optimizer, 2)
    weights, state = copy.deepcopy(model.state_dict()), optimizer.state_dict()

    def full(self: Scratch, buffer: torch.Tensor) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Scratch, "write", full)
        with pytest.raises(OSError, match="no space left"):
            train(model, optimizer, 1, start=2)
            optimizer.flush()
    for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="lost on its way; load_state_dict helps"):
            call()
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train(model, optimizer, 2, start=2)
    assert same(model, whole)


def test_files_have_no_names_and_whole_pages(tmp_path: Path) -> None:
    file = Scratch(tmp_path, PAGE + 1)
    assert not list(tmp_path.iterdir()) and file.nbytes == 2 * PAGE
    sent, back = aligned(2 * PAGE), aligned(2 * PAGE)
    sent.copy_(torch.arange(2 * PAGE) % 251)
    file.write(sent)
    file.read(back)
    assert torch.equal(sent, back) and not torch.equal(back[:PAGE], back[PAGE:])
    for buffer in (aligned(PAGE), aligned(3 * PAGE)[1 : 1 + 2 * PAGE]):
        with pytest.raises(ValueError, match="from a page on"):
            file.read(buffer)
    file.close()
    file.close()


def test_no_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    model = layers()
    optimizer = made(model, "files", tmp_path)
    with pytest.raises(OSError, match="no space left"):
        train(model, optimizer, 1)
    assert not list(tmp_path.iterdir())
    assert not before or len(os.listdir("/proc/self/fd")) == before


def test_without_direct_transfers_it_works_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    ours, theirs = layers(), layers()
    optimizer = made(ours, "files", tmp_path)
    assert optimizer.direct is None
    train(ours, optimizer, 3)
    train(theirs, made(theirs, "host", tmp_path), 3)
    assert same(ours, theirs) and optimizer.direct is False


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = layers()
    with pytest.raises(ValueError, match="'host' or a folder that exists"):
        made(model, "files", tmp_path / "absent")
    for variant in ("momentum", "gradient-ef"):
        with pytest.raises(ValueError, match="one of exact, gradient, local"):
            made(model, "host", tmp_path, variant=variant)
    with pytest.raises(ValueError, match="capturable=True keeps the state on the device"):
        made(model, "host", tmp_path, variant="local", nonfinite="propagate", capturable=True)
    with pytest.raises(TypeError, match="use state_dict"):
        copy.deepcopy(made(model, "host", tmp_path))
    with pytest.raises(ValueError, match="state of another optimizer"):
        other = made(model, "host", tmp_path, state=(4, 8))
        train(model, other, 1)
        made(model, "host", tmp_path).load_state_dict(other.state_dict())


def test_tensors_of_a_bucket_lie_apart_and_keep_their_kind() -> None:
    tensors = {"m": torch.randn(7, 3), "codes": torch.arange(9, dtype=torch.uint8), "none": torch.zeros(0)}
    layout = offload._Layout(tensors)
    views = layout.views(aligned(layout.nbytes))
    for name, view in views.items():
        view.copy_(tensors[name])
    assert all(torch.equal(views[name], tensors[name]) for name in tensors)
    starts = [part.start for part in layout.parts.values()]
    assert starts == sorted(starts) and all(start % ALIGN == 0 for start in starts)
    assert layout.nbytes % PAGE == 0 and layout.content == sum(x.nbytes for x in tensors.values())
    assert layout.fits(tensors) and not layout.fits({**tensors, "m": tensors["m"].double()})
