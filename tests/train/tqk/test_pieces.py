"""Checkpoints that share what did not change: exact, whole by themselves, and safe from each other's damage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.train.tqk.crashes import Recorder
from tq.train import tqk
from tq.train.tqk import Checkpoints, pieces
from tq.train.tqk.disk import Disk

SHAPES = ((), (0,), (7,), (300, 17), (5, 0, 3), (2, 3, 4), (1, 900))


def same(one: dict, other: dict) -> bool:
    """Bit for bit, NaN included."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and one[name].shape == other[name].shape
        and torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8))
        for name in one
    )  # fmt: skip


@given(st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.int64)), st.integers(40, 4000))
@settings(max_examples=30)
def test_exact_for_any_shape_and_size_of_piece(tmp_path_factory, dtype, piece):
    folder = tmp_path_factory.mktemp("pieces")
    state = {str(shape): (torch.randn(shape) * 1e3).to(dtype) for shape in SHAPES}
    state["nan"] = torch.full((9,), float("nan"))
    path = folder / f"rank-0{pieces.ENDING}"
    pieces.save_pieces(path, state, piece=piece)
    with tqk.File(path) as file:
        assert same(pieces.load_pieces(file), state)


def model(step: int) -> dict:
    generator = torch.Generator().manual_seed(step)
    frozen = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    return {"frozen": frozen, "adapter": torch.randn(4, 1000, generator=generator), "step": step}


def test_what_did_not_change_is_not_written_again(tmp_path):
    checkpoints = Checkpoints(tmp_path, share=True)
    first, second = (checkpoints.save(step, model(step)) for step in (1, 2))
    assert first > 64 * 1000 * 3 and second < 4 * 1000 * 4 + 4_000
    found = checkpoints.load()
    assert torch.equal(found["frozen"], model(2)["frozen"]) and torch.equal(found["adapter"], model(2)["adapter"])
    assert checkpoints.save(3, model(3)) < 20_000, "it links what was a link"
    assert checkpoints.steps() == [2, 3] and checkpoints.load(2)["step"] == 2


def test_rows_that_no_token_touched(tmp_path):
    table = torch.randn(4096, 256)
    checkpoints = Checkpoints(tmp_path, share=True)
    whole = checkpoints.save(1, {"embedding": table})
    table[5] += 1
    assert checkpoints.save(2, {"embedding": table}) < whole / 3
    assert torch.equal(checkpoints.load()["embedding"], table)


def test_equal_tensors_of_one_state_are_one_piece(tmp_path):
    ones = torch.ones(1000, 100)
    path = tmp_path / f"a{pieces.ENDING}"
    pieces.save_pieces(path, {"a": ones, "b": ones.clone(), "c": torch.ones(1000, 100, dtype=torch.float64)})
    assert len(list(tmp_path.iterdir())) == 3


def test_damage_does_not_spread(tmp_path):
    """A piece that was damaged on the disk is not linked: it is written again."""
    checkpoints = Checkpoints(tmp_path, share=True)
    checkpoints.save(1, model(1))
    largest = max(tmp_path.glob("*/*.tqk"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    with pytest.raises(tqk.DamagedFile):
        checkpoints.load()
    assert checkpoints.save(2, model(2)) > 64 * 1000 * 3
    assert torch.equal(checkpoints.load()["frozen"], model(2)["frozen"])


@pytest.mark.parametrize("how", ["missing", "another", "manifest"])
def test_damage_is_told(tmp_path, how):
    checkpoints = Checkpoints(tmp_path, share=True)
    checkpoints.save(1, model(1))
    found = [path for path in tmp_path.glob("*/*.tqk") if not path.name.endswith(pieces.ENDING)]
    if how == "missing":
        found[0].unlink()
    elif how == "another":
        tqk.save(found[0], torch.zeros(3))
    else:
        manifest = next(tmp_path.glob(f"*/*{pieces.ENDING}"))
        tqk.save(manifest, {"state": {}, "tensors": {"a": {"dtype": "float32", "shape": [4], "pieces": []}}})
    with pytest.raises(tqk.DamagedFile, match="damaged"):
        checkpoints.load()


def test_a_file_system_without_links(tmp_path):
    class Without(Disk):
        def link(self, old: Path, new: Path) -> None:
            raise OSError(95, "not supported")

    checkpoints = Checkpoints(tmp_path, share=True, disk=Without())
    first, second = (checkpoints.save(step, model(step)) for step in (1, 2))
    assert second == pytest.approx(first, rel=0.01) and checkpoints.load()["step"] == 2


def test_checkpoints_of_both_kinds_lie_in_one_folder(tmp_path):
    Checkpoints(tmp_path).save(1, model(1))
    Checkpoints(tmp_path, share=True).save(2, model(2))
    assert Checkpoints(tmp_path).load()["step"] == 2 and Checkpoints(tmp_path, share=True).load(1)["step"] == 1


def test_links_are_on_the_disk_before_what_needs_them(tmp_path):
    disk = Recorder()
    checkpoints = Checkpoints(tmp_path, share=True, disk=disk)
    for step in (1, 2):
        checkpoints.save(step, model(step))
    done = [(entry[0], os.path.basename(entry[1])) for entry in disk.log]
    links = [number for number, (kind, _) in enumerate(done) if kind == "link"]
    manifest = max(number for number, entry in enumerate(disk.log) if str(entry[-1]).endswith(pieces.ENDING))
    assert links and any(kind == "sync_folder" for kind, _ in done[max(links) : manifest])
