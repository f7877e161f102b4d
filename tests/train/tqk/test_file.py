"""Files of states: what went in comes out; read by tensor and by row; every damage is noticed; old files survive."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import stat
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import pytest
import torch

from tq.quant.lossless import FRAME
from tq.train import tqk
from tq.train.tqk.disk import DISK, Disk
from tq.train.tqk.file import _END, MAGIC


def state_of(seed: int = 0, rows: int = 300, columns: int = 200) -> dict:
    draw = torch.Generator().manual_seed(seed)
    v = (torch.randn(rows, 1, generator=draw) + torch.randn(1, columns, generator=draw) - 9).exp()
    m = v.sqrt() * torch.randn(rows, columns, generator=draw)
    weight = torch.randn(rows, columns, generator=draw)
    return {
        "model": {"weight": weight, "tied": weight, "norm": torch.ones(columns), "half": weight.bfloat16()},
        "optimizer": {
            "state": {0: {"exp_avg": m, "exp_avg_sq": v, "step": torch.tensor(7.0)}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.95), "params": [0], "bad": float("inf")}],
        },
        "step": 7, "name": "a", "nothing": None, "dtype": torch.bfloat16, "kind": {"kind": "mine"}, "empty": [(), {}],
    }  # fmt: skip


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def test_a_state_comes_back_whole(tmp_path):
    state, path = state_of(), tmp_path / "new" / "folder" / "x.tqk"
    size = tqk.save(path, state)
    assert size == path.stat().st_size and list(path.parent.iterdir()) == [path]
    back = tqk.load(path)
    step = back["optimizer"]["state"][0].pop("step")  # 0 dimensions cannot be viewed as bytes
    assert step == state["optimizer"]["state"][0].pop("step") and step.shape == ()
    assert same(back, state)
    assert back["model"]["tied"] is back["model"]["weight"], "one tensor is stored once"
    with tqk.File(path) as file:
        assert file.describe("optimizer/state/0/exp_avg")["given"] == "optimizer/state/0/exp_avg_sq"
        assert file.describe("model/weight")["same"] == "model/tied" or file.describe("model/tied")["same"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, "as any other file of this user"


def test_the_file_does_not_depend_on_threads(tmp_path):
    for threads in (1, 3):
        tqk.save(tmp_path / f"{threads}.tqk", state_of(1, 900, 1000), threads=threads)
    assert (tmp_path / "1.tqk").read_bytes() == (tmp_path / "3.tqk").read_bytes()


def test_rows_cost_their_frames(tmp_path):
    state = state_of(2, 3000, 700)["optimizer"]["state"][0]
    tqk.save(tmp_path / "x.tqk", state)
    with tqk.File(tmp_path / "x.tqk") as file:
        footer, largest = file.bytes_read, 4 * FRAME
        for rows in ((0, 1), (1000, 1010), (2999, 3000), (5, 5), (0, 3000)):
            for name in ("exp_avg", "exp_avg_sq"):
                before = file.bytes_read
                assert torch.equal(file.read(name, rows=rows), state[name][slice(*rows)])
                frames = len({k // FRAME for k in (rows[0] * 700, max(rows[0] * 700, rows[1] * 700 - 1))})
                if rows[1] - rows[0] < 20:  # m asks for the same frames of v, and those that its frame overlaps
                    assert file.bytes_read - before <= (1 if name == "exp_avg_sq" else 4) * frames * largest + 4000
        assert footer < 4000
        for rows in ((-1, 3), (3, 2), (0, 3001)):
            with pytest.raises(ValueError, match="rows"):
                file.read("exp_avg", rows=rows)
        with pytest.raises(KeyError, match="no tensor 'w'"):
            file.read("w")


def test_what_a_file_cannot_hold(tmp_path):
    for value in (object(), {1, 2}, print, 1j):
        with pytest.raises(TypeError, match="cannot hold"):
            tqk.save(tmp_path / "x.tqk", {"a": [value]})
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "x.tqk"
    tqk.save(path, {"w": torch.randn(40, 50, generator=torch.Generator().manual_seed(0)), "n": 3, "z": torch.zeros(9)})
    return path.read_bytes()


def outcome(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        tqk.load(path)
    except tqk.DamagedFile as error:
        assert "x.tqk is damaged" in str(error) and "\n" not in str(error)
        return "refused"
    return "read"


def test_every_byte_and_every_length_matters(small, tmp_path):
    path = tmp_path / "x.tqk"
    assert outcome(path, small) == "read"
    for size in range(0, len(small), 1 if len(small) < 2000 else 7):
        assert outcome(path, small[:size]) == "refused", f"cut to {size} bytes"
    for at in range(0, len(small), 3):
        changed = bytearray(small)
        changed[at] ^= 1 << at % 8
        assert outcome(path, bytes(changed)) == "refused", f"byte {at}"
    assert outcome(path, small + b"\0") == "refused"


def mutated(content: bytes, draw: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, size = draw.randrange(len(data)), draw.choice((1, 2, 8, 500))
        kind = draw.randrange(5)
        if kind == 0:
            data[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[at : at + size] = draw.randbytes(size)
        elif kind == 2:
            del data[at : at + size]
        elif kind == 3:
            data[at:at] = data[draw.randrange(len(data)) :][:size]
        else:
            data[at : at + size] = bytes(size)
        data = data or bytearray(1)
    return bytes(data)


def test_ten_thousand_damaged_files_are_refused(small, tmp_path):
    draw = random.Random(0)
    for _ in range(10_000):
        damaged = mutated(small, draw)
        if damaged != small:
            assert outcome(tmp_path / "x.tqk", damaged) == "refused"


@pytest.mark.soak
def test_a_hundred_thousand_mutated_files(small, tmp_path):
    """No crash, no wait, no silence, and no memory beyond twice the file, but for what Python itself takes."""
    draw, before = random.Random(1), 0
    for number in range(100_000):
        damaged = mutated(small, draw)
        if damaged != small:
            assert outcome(tmp_path / "x.tqk", damaged) == "refused"
        if number == 5_000:  # what Python, NumPy and pytest themselves take is taken by now
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * len(small) // 1024 + 2048  # kB


def resealed(content: bytes, change) -> bytes:
    """The file with another footer under right checksums, as somebody would write who means harm."""
    _, size, _ = _END.unpack(content[-_END.size :])
    footer = json.loads(content[-_END.size - size : -_END.size])
    change(footer)
    said = json.dumps(footer).encode()
    end = _END.pack(blake2b(said, digest_size=16).digest(), len(said), MAGIC)
    return content[: -_END.size - size] + said + end


def test_nothing_fits_in_between(small, tmp_path):
    footer = len(small) - _END.size - _END.unpack(small[-_END.size :])[1]
    assert outcome(tmp_path / "x.tqk", small[:footer] + b"more" + small[footer:]) == "refused"


def test_footers_that_mean_harm(small, tmp_path):
    def entry(**what):
        return lambda footer: footer["tensors"][0].update(what)

    deep: list = []
    for _ in range(200):
        deep = [deep]
    changes = [
        entry(shape=[1 << 40, 1 << 20]), entry(shape=[-40, -50]), entry(shape=[40.0, 50]), entry(shape="40"),
        entry(dtype="float7"), entry(dtype="float64"), entry(base=1 << 50), entry(base="x"), entry(given="w"),
        entry(given="nobody"), entry(frames=[]), entry(frames=[[0, 1 << 60, 0, 0]]), entry(frames=[[-5, 10, 0, 0]]),
        entry(steps=[8, 5, 0]), entry(same="w"), entry(name="z"), lambda f: f.update(state=deep),
        lambda f: f.update(state={"kind": "tensor", "of": "nobody"}), lambda f: f.update(tensors={}),
        lambda f: f.update(state={"kind": "exec", "of": "1"}), lambda f: f.pop("state"),
        lambda f: f.update(tensors=[1]),
        lambda f: f.update(begins=f["begins"] + 1), lambda f: f.update(state={"kind": "pairs", "of": [[[1], 2]]}),
    ]  # fmt: skip
    for number, change in enumerate(changes):
        assert outcome(tmp_path / "x.tqk", resealed(small, change)) == "refused", number
    with pytest.raises(ValueError, match="format 2; this reads format 1"):
        (tmp_path / "x.tqk").write_bytes(resealed(small, lambda footer: footer.update(version=2)))
        tqk.load(tmp_path / "x.tqk")


class Failing(Disk):
    """Fails at one operation of a kind, or short of it."""

    def __init__(self, operation: str, number: int, error: int) -> None:
        self.operation, self.left, self.error = operation, number, error

    def _may(self, operation: str) -> None:
        if operation == self.operation:
            self.left -= 1
            if self.left < 0:
                raise OSError(self.error, os.strerror(self.error))

    def create(self, path):
        self._may("create")
        return super().create(path)

    def write(self, file, data):
        self._may("write")
        super().write(file, data)

    def sync(self, file):
        self._may("sync")
        super().sync(file)

    def rename(self, old, new):
        self._may("rename")
        super().rename(old, new)

    def sync_folder(self, path):
        self._may("sync_folder")
        super().sync_folder(path)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
def test_a_disk_that_fails_leaves_the_old_file(tmp_path, operation, error):
    path = tmp_path / "x.tqk"
    tqk.save(path, {"n": 1})
    for number in (0, 2) if operation == "write" else (0,):
        with pytest.raises(tqk.SaveFailed, match=r"could not write x.tqk \(.*\); what was saved before it") as caught:
            tqk.save(path, state_of(), disk=Failing(operation, number, error))
        assert caught.value.errno == error and "\n" not in str(caught.value)
        assert tqk.load(path) == {"n": 1} and list(tmp_path.iterdir()) == [path]


def test_a_file_that_may_not_grow(tmp_path):
    """A real short write: the kernel refuses bytes beyond a limit."""
    path = tmp_path / "x.tqk"
    tqk.save(path, {"n": 1})
    script = f"""
import resource, signal, sys, torch
from tq.train import tqk
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    tqk.save({str(path)!r}, {{"w": torch.randn(300, 300)}})
except tqk.SaveFailed as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert "larger than is allowed" in done.stdout, done.stderr
    assert tqk.load(path) == {"n": 1} and list(tmp_path.iterdir()) == [path]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 50_000


def test_a_folder_that_may_not_be_written(tmp_path):
    """Root may write anywhere, so a child of it becomes nobody."""
    tmp_path.chmod(0o555)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for folder in tmp_path.parents:
                if os.geteuid() == 0 and folder.owner() == "root" and folder.is_relative_to("/tmp"):  # noqa: S108
                    folder.chmod(folder.stat().st_mode | 0o011)
            os.setuid(65534 if os.geteuid() == 0 else os.geteuid())
            tqk.save(tmp_path / "x.tqk", {"n": 1})
        except tqk.SaveFailed as error:
            code = 0 if "may not write there" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tmp_path.chmod(0o700)


def test_an_interrupt_leaves_nothing_beside(tmp_path, monkeypatch):
    def interrupted(file, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(DISK, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tqk.save(tmp_path / "x.tqk", {"n": 1})
    assert not list(tmp_path.iterdir())


def test_no_file_and_a_closed_file(tmp_path, small):
    with pytest.raises(FileNotFoundError):
        tqk.load(tmp_path / "none.tqk")
    (tmp_path / "x.tqk").write_bytes(small)
    with tqk.File(tmp_path / "x.tqk") as file:
        pass
    file.close()
    with pytest.raises(OSError):
        file.read("w")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_predicts_may_be_another_tensor_s_numbers(tmp_path, threads):
    """exp_avg_sq that is stored once under another name, and many tensors at the same time."""
    v = torch.rand(300, 100) * 1e-6
    state = {"first": v, "a": {"exp_avg": v.sqrt() * torch.randn(300, 100), "exp_avg_sq": v}}
    state |= {str(number): torch.randn(number * 37) for number in range(20)}
    tqk.save(tmp_path / "x.tqk", state, threads=threads)
    found = tqk.load(tmp_path / "x.tqk", threads=threads)
    assert torch.equal(found["a"]["exp_avg"], state["a"]["exp_avg"]) and torch.equal(found["a"]["exp_avg_sq"], v)
    assert all(torch.equal(found[str(number)], state[str(number)]) for number in range(20))


def test_a_file_of_many_tensors_does_not_depend_on_threads(tmp_path):
    state = {str(number): torch.randn(400, 50 * number) for number in range(1, 12)} | {"large": torch.randn(1500, 1000)}
    for threads in (1, 2, 3):
        tqk.save(tmp_path / f"{threads}.tqk", state, threads=threads)
    whole = {(tmp_path / f"{threads}.tqk").read_bytes() for threads in (1, 2, 3)}
    assert len(whole) == 1
