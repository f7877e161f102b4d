"""A trainer whose layers lie in files: the same bits as in memory, whole after a kill, and inside its memory."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tq.train.model import GPT, GPTConfig, TrainConfig, Trainer, load
from tq.train.offload import PAGE
from tq.train.optim import TurboQuantAdamW
from tq.train.stream import StreamedTrainer, layer_groups
from tq.train.stream import trial as trials
from tq.train.stream.__main__ import bytes_of, main
from tq.train.stream.export import save
from tq.train.stream.files import Lane, Pages, Spill, Threads, buffer_of
from tq.train.stream.forecast import Run, Speeds, disk_bytes, memory_need, step_model
from tq.train.stream.layout import Model
from tq.train.stream.trial import Trial, depths, forecast, trial

ROOT = Path(__file__).resolve().parents[2]
SHAPE = GPTConfig(layers=3, hidden=32, heads=2, vocab=256, seq=32)
CORPUS = load("stdlib", max_bytes=200_000)
CONFIG = TrainConfig(steps=20, batch=4, lr=3e-3)


def twin(shape: GPTConfig, config: TrainConfig, state: Any = None, impl: str = "auto", seed: int = 0) -> Trainer:
    """The same run in memory."""
    model = GPT(shape, seed=seed)

    def optimizer(_: Any) -> TurboQuantAdamW:
        return TurboQuantAdamW(
            layer_groups(model, config.weight_decay), betas=config.betas, eps=config.eps, lr=config.lr,
            variant="local", state=state, impl=impl, bucket_elements=1 << 40,
        )  # fmt: skip

    return Trainer(model, CORPUS, config, optimizer=optimizer)


def equal(trainer: StreamedTrainer, other: Trainer) -> bool:
    weights = dict(trainer.weights())
    named = dict(other.model.named_parameters())
    return list(weights) == list(named) and all(torch.equal(weights[name], p) for name, p in named.items())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("state", [None, (4, 8)])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("inputs", ["memory", "place"])
def test_twenty_steps_are_those_in_memory_bit_for_bit(
    tied: bool, state: Any, clip: float | None, inputs: str, tmp_path: Path
) -> None:
    shape = GPTConfig(layers=3, hidden=32, heads=2, vocab=256, seq=32, tie_embeddings=tied, kv_heads=1)
    config = TrainConfig(steps=20, batch=4, lr=3e-3, grad_clip=clip)
    other = twin(shape, config, state, seed=3)
    losses = other.train(progress=False)
    with StreamedTrainer(shape, CORPUS, config, tmp_path, state=state, seed=3, inputs=inputs) as trainer:
        assert trainer.train(progress=False) == losses
        assert equal(trainer, other)
        assert trainer.evaluate(3) == other.evaluate(3)
        for name, first, m, v in trainer.moments():
            theirs = other.optimizer.moments(other.model.get_parameter(name))  # type: ignore[attr-defined]
            rows = slice(first, first + len(m))
            assert torch.equal(m, theirs[0][rows]) and torch.equal(v, theirs[1][rows])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(1, 4), resident=st.integers(0, 5), resumable=st.booleans(), files=st.booleans(),
    activation=st.sampled_from(["gelu", "swiglu", "relu2"]), autocast=st.sampled_from([None, torch.bfloat16]),
    impl=st.sampled_from(["auto", "reference"]), clip=st.sampled_from([None, 0.3]), vocab=st.sampled_from([256, 777]),
)  # fmt: skip
def test_any_shape_and_place_gives_the_same_bits(
    layers: int, resident: int, resumable: bool, files: bool, activation: str, autocast: Any, impl: str,
    clip: float | None, vocab: int, tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    shape = GPTConfig(layers=layers, hidden=16, heads=2, vocab=vocab, seq=16, activation=activation, qk_norm=True)
    config = TrainConfig(steps=4, batch=2, lr=1e-2, grad_clip=clip, autocast=autocast)
    other = twin(shape, config, impl=impl)
    losses = other.train(progress=False)
    place = tmp_path_factory.mktemp("place") if files else None
    with StreamedTrainer(
        shape, CORPUS, config, place, resident=resident, resumable=resumable, impl=impl
    ) as trainer:  # fmt: skip
        assert trainer.train(progress=False) == losses and equal(trainer, other)


def test_micro_batches_are_exact_where_the_embedding_is_not_tied(tmp_path: Path) -> None:
    shape = GPTConfig(layers=2, hidden=16, heads=2, vocab=256, seq=16, tie_embeddings=False)
    config = TrainConfig(steps=5, batch=6, accumulate=3, grad_clip=0.5)
    other = twin(shape, config)
    losses = other.train(progress=False)
    with StreamedTrainer(shape, CORPUS, config, tmp_path, inputs="place") as trainer:
        assert trainer.train(progress=False) == losses
        theirs = dict(other.model.named_parameters())
        assert all(torch.allclose(x, theirs[name], atol=1e-6) for name, x in trainer.weights())


def test_loss_in_pieces_and_inputs_in_few_bits_stay_close() -> None:
    config = TrainConfig(steps=8, batch=4, lr=3e-3)
    losses = twin(SHAPE, config).train(progress=False)
    with StreamedTrainer(SHAPE, CORPUS, config, loss_tokens=7) as pieces:
        assert pieces.train(progress=False) == pytest.approx(losses, abs=1e-4)
    with StreamedTrainer(SHAPE, CORPUS, config, inputs=4) as coded:
        found = coded.train(progress=False)
        assert found != losses and found == pytest.approx(losses, abs=0.05)


def test_inputs_in_4_bits_take_a_seventh() -> None:
    x = torch.randn(4, 64, 256)
    spill = Spill(4, None, threads := Threads(), x.nbytes, 1)
    spill.put(0, x)
    assert x.nbytes / spill.nbytes > 7
    assert (spill.get(0) - x).norm() / x.norm() < 0.12
    threads.close()


def test_the_norm_of_the_step_before_clips(tmp_path: Path) -> None:
    config = TrainConfig(steps=4, batch=2, grad_clip=1e-3)
    with StreamedTrainer(SHAPE, CORPUS, config, tmp_path, clip="previous") as trainer:
        trainer.train(2, progress=False)
        assert trainer.norm is not None and trainer.norm > 1e-3
        before = dict(trainer.weights())
        trainer.step()
        m = {name: m for name, _, m, _ in trainer.moments()}
    assert sum(float(x.square().sum()) for x in m.values()) ** 0.5 < 1.0 and before.keys() == m.keys()


# --- what moves ---
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("resident", "resumable"), [(0, True), (2, True), (2, False)])
def test_bytes_are_those_of_the_model(clip: float | None, resident: int, resumable: bool, tmp_path: Path) -> None:
    shape = GPTConfig(layers=3, hidden=128, heads=2, vocab=256, seq=32)
    config = TrainConfig(steps=3, batch=2, grad_clip=clip)
    run = Run(shape, config, tmp_path, inputs="place", resumable=resumable, resident=resident)
    model = step_model(run, Speeds(0.1, 0.2, 0.01, 0.01, 1e9, 1e9, 1e9))
    with StreamedTrainer(
        shape, CORPUS, config, tmp_path, inputs="place", resident=resident, resumable=resumable
    ) as trainer:  # fmt: skip
        trainer.train(2, progress=False)
        trainer.step()
        assert trainer.work is not None
        assert trainer.work.bytes_read == pytest.approx(model.bytes_read(), rel=0.02)
        assert trainer.work.bytes_written == pytest.approx(model.bytes_written(), rel=0.02)
        files = sum(x.stat().st_size for x in tmp_path.iterdir())
        assert files <= disk_bytes(run) * 1.01 + 8192


def test_28_and_15_bytes_a_parameter() -> None:
    shape = GPTConfig(layers=8, hidden=256, heads=4, vocab=256, seq=64)
    for state, expected in ((None, 28.0), ((4, 8), 15.1)):
        run = Run(shape, TrainConfig(steps=1, grad_clip=None), Path(), state)
        step = step_model(run, Speeds(0.1, 0.2, 0.01, 0.01, 1e9, 1e9, 1e9))
        layers = 8 * Model(shape, state).block.numel
        moved = step.bytes_read() + step.bytes_written() - sum(step.end_bytes)
        assert moved / layers == pytest.approx(expected, rel=0.01)


# --- killed, broken, refused ---
CHILD = """
import sys
from tq.train.model import GPTConfig, TrainConfig, load
from tq.train.stream import StreamedTrainer
shape = GPTConfig(layers=3, hidden=32, heads=2, vocab=256, seq=32)
config = TrainConfig(steps=400, batch=4, lr=3e-3)
with StreamedTrainer(shape, load("stdlib", max_bytes=200_000), config, sys.argv[1], impl="reference") as trainer:
    print("ready", flush=True)
    while True:
        trainer.step()
        print(trainer.steps_done, flush=True)
"""


def test_killed_at_any_moment_it_goes_on_from_a_whole_step(tmp_path: Path) -> None:
    config, done = TrainConfig(steps=400, batch=4, lr=3e-3), 0
    for kill in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as child:  # fmt: skip
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip().isdigit() and int(line) >= done + 2:
                    break
            time.sleep(0.003 + 0.007 * kill)
            child.send_signal(signal.SIGKILL)
        note = json.loads((tmp_path / "step.json").read_text())
        assert note["steps"] >= done + 2
        done = note["steps"]
    other = twin(SHAPE, config, impl="reference")
    with StreamedTrainer(SHAPE, CORPUS, config, tmp_path, impl="reference") as trainer:
        assert trainer.steps_done == done
        losses = other.train(done + 3, progress=False)
        trainer.train(done + 3, progress=False)
        assert trainer.losses == losses and equal(trainer, other)


def test_what_cannot_go_on_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path) as trainer:
        trainer.train(2, progress=False)
        with pytest.raises(OSError, match="another process works in"):
            StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path)
    with pytest.raises(ValueError, match=r"another run: run.lr was 0.003 there and is 0.1 here"):
        StreamedTrainer(SHAPE, CORPUS, TrainConfig(steps=20, batch=4, lr=0.1), tmp_path)
    with pytest.raises(ValueError, match="can be resumed; scratch needs another folder"):
        StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path, resumable=False)
    data = tmp_path / "layers.bin"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"layers.bin has .* bytes, a run with these settings"):
        StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path)
    data.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match="holds something else where record"), StreamedTrainer(
        SHAPE, CORPUS, CONFIG, tmp_path
    ) as trainer:  # fmt: skip
        trainer.step()
    (tmp_path / "step.json").write_text("{")
    with pytest.raises(ValueError, match=r"step.json is damaged"):
        StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path)


def test_scratch_leaves_nothing(tmp_path: Path) -> None:
    with StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path, resumable=False) as trainer:
        trainer.step()
        assert list(tmp_path.iterdir()) == []


def test_a_gradient_that_is_not_finite_changes_nothing_that_counts(tmp_path: Path) -> None:
    config = TrainConfig(steps=20, batch=4, grad_clip=None)
    with StreamedTrainer(SHAPE, CORPUS, config, tmp_path) as trainer:
        trainer.train(3, progress=False)
        kept = dict(trainer.weights())
        trainer.resident["final_norm.weight"][0] = float("nan")
        with pytest.raises(FloatingPointError, match=r"step 3: loss nan; nothing was changed"):
            trainer.step()
    with StreamedTrainer(SHAPE, CORPUS, config, tmp_path) as trainer:
        assert trainer.steps_done == 3 and all(torch.equal(x, kept[name]) for name, x in trainer.weights())
        trainer.step()


def test_a_write_that_fails_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path) as trainer:
        trainer.train(2, progress=False)

        def broken(*_: Any) -> None:
            raise OSError(5, "the disk reports an error")

        monkeypatch.setattr(trainer.records.pages, "write", broken)
        with pytest.raises(OSError, match="the disk reports an error"):
            trainer.step()
        with pytest.raises(RuntimeError, match="open it again"):
            trainer.step()
    monkeypatch.undo()
    other = twin(SHAPE, CONFIG)
    losses = other.train(3, progress=False)
    with StreamedTrainer(SHAPE, CORPUS, CONFIG, tmp_path) as trainer:
        trainer.step()
        assert trainer.losses == losses and equal(trainer, other)


REFUSED = {
    "inputs": (9, "inputs must be"), "clip": ("layer", "clip must be"), "resident": (-1, "resident must be"),
    "loss_tokens": (0, "loss_tokens must be"), "impl": ("gpu", "impl must be"), "state": ((4, 3), "state must be"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments(name: str) -> None:
    value, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        StreamedTrainer(SHAPE, CORPUS, CONFIG, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (TrainConfig(steps=1, compile=True), "cannot be compiled"),
        (TrainConfig(steps=1, autocast=torch.float16), "float16"),
        (TrainConfig(steps=1, seq=64), "longer than"),
    ],
)
def test_wrong_runs(config: TrainConfig, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        StreamedTrainer(SHAPE, CORPUS, config)


def test_weights_go_out_and_come_in(tmp_path: Path) -> None:
    from safetensors import safe_open

    with StreamedTrainer(SHAPE, CORPUS, CONFIG, seed=5) as trainer:
        trainer.train(2, progress=False)
        save(trainer, tmp_path / "model.safetensors")
        weights = dict(trainer.weights())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == weights.keys() and all(torch.equal(found[name], x) for name, x in weights.items())
    GPT(SHAPE).load_state_dict({**found, "head.weight": found["embed.weight"]})
    with StreamedTrainer(SHAPE, CORPUS, CONFIG, weights=found) as trainer:
        assert all(torch.equal(found[name], x) for name, x in trainer.weights())
    with pytest.raises(ValueError, match="weights lack final_norm.weight"):
        StreamedTrainer(SHAPE, CORPUS, CONFIG, weights={k: v for k, v in found.items() if "final" not in k})


def test_pages_say_how_much_they_moved(tmp_path: Path) -> None:
    from tq.train.offload import aligned

    pages, buffer = Pages(tmp_path, 10_000), aligned(8192).fill_(7)
    pages.write(4096, buffer)
    back = aligned(8192)
    pages.read(4096, back)
    assert pages.nbytes == 12_288 and pages.bytes_read == pages.bytes_written == 8192 and torch.equal(back, buffer)
    with pytest.raises(OSError, match=r"broke off|Invalid"):
        pages.read(8192, back)


def test_finished_writes_are_forgotten_and_failed_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note per layer would lie between freed buffers, so that memory grows with the depth of a model."""
    pages, threads = Pages(tmp_path, 100 * PAGE), Threads()
    lane = Lane(pages, threads, PAGE, 3)
    try:
        most = 0
        for record in range(100):
            lane.write(record, record * PAGE, lane.take().fill_(record), PAGE)
            most = max(most, len(lane._writing))
        assert most <= 4  # three buffers can be under way
        buffer = lane.fetch(99, 99 * PAGE, 0, PAGE)
        assert int(buffer[0]) == 99
        lane.give(buffer)

        def lost(*_: Any) -> None:
            raise OSError(5, "lost")

        with monkeypatch.context() as patched:
            patched.setattr(pages, "write", lost)
            lane.write(3, 3 * PAGE, lane.take(), PAGE)
            assert lane._writing[3].exception() is not None
        lane.write(4, 4 * PAGE, lane.take(), PAGE)
        with pytest.raises(OSError, match="lost"):
            lane.drain()
    finally:
        threads.close()
        pages.close()


# --- in a ceiling ---
CEILING = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from tq.train.model import GPTConfig, TrainConfig, load
from tq.train.stream import StreamedTrainer
from tq.train.stream.forecast import Run, load_program, memory_need
shape = GPTConfig(layers=128, hidden=128, heads=4, vocab=256, seq=64)
config = TrainConfig(steps=2, batch=2, grad_clip=None)
program = load_program("reference")
need = sum(memory_need(Run(shape, config, sys.argv[1], inputs="place", impl="reference"), program).values())
ceiling = need + (8 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (ceiling, ceiling))
corpus = load("stdlib", max_bytes=200_000)
with StreamedTrainer(shape, corpus, config, sys.argv[1], inputs="place", impl="reference") as trainer:
    losses = trainer.train(progress=False)
try:
    held = [torch.zeros(shape.num_parameters) for _ in range(4)]
    refused = False
except (RuntimeError, MemoryError):
    refused = True
print(json.dumps({"refused": refused, "losses": losses, "ceiling": ceiling - program,
                  "state": 12 * shape.num_parameters}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts as needed on Linux only")
def test_it_trains_under_a_ceiling_that_refuses_the_model_in_memory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CEILING, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-1000:]
    found = json.loads(run.stdout)
    assert found["refused"] and found["state"] > 8 * found["ceiling"]
    shape = GPTConfig(layers=128, hidden=128, heads=4, vocab=256, seq=64)
    assert found["losses"] == twin(shape, TrainConfig(steps=2, batch=2, grad_clip=None), impl="reference").train(
        progress=False
    )  # fmt: skip


# --- the command ---
def test_sizes() -> None:
    assert [bytes_of(x) for x in ("400MB", "1.5GiB", "7", "2 k")] == [400_000_000, 1_610_612_736, 7, 2000]


def test_the_command_says_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--preset", "tiny", "--layers", "3", "--place", str(tmp_path), "--batch", "2", "--impl", "reference"]
    assert main([*common, "--memory", "64GB", "--dry-run", "--steps", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("parameters in 3 layers", "binds", "a step reads", "steps"))
    assert main([*common, "--memory", "1MB", "--steps", "2"]) == 1
    assert capsys.readouterr().err.startswith("stream: it does not fit: a step needs")


def test_memory_grows_with_what_is_asked() -> None:
    base = Run(SHAPE, CONFIG, Path(), inputs="place")
    need = sum(memory_need(base, 0).values())
    for more in (
        Run(SHAPE, CONFIG, Path(), resident=2, inputs="place"), Run(SHAPE, CONFIG, None),
        Run(GPTConfig(layers=3, hidden=32, heads=2, vocab=5000, seq=32), CONFIG, Path(), inputs="place"),
    ):  # fmt: skip
        assert sum(memory_need(more, 0).values()) > need
    deeper = GPTConfig(layers=300, hidden=32, heads=2, vocab=256, seq=32)
    assert sum(memory_need(Run(deeper, CONFIG, Path(), inputs="place"), 0).values()) == need


def run_of(place: Path | None, layers: int = 10, resident: int = 0, inputs: str = "memory") -> Run:
    shape = GPTConfig(layers=layers, hidden=32, heads=2, vocab=256, seq=32)
    return Run(shape, CONFIG, place, None, inputs, resident=resident, impl="reference")


def test_a_trial_is_a_line_through_two_depths(tmp_path: Path) -> None:
    assert depths(run_of(None)) == (2, 6) and depths(run_of(None, resident=3)) == (5, 9)
    assert depths(run_of(None, layers=4)) == (2, 4) and depths(run_of(None, layers=2)) == (2,)
    assert Trial((2, 6), (1.0, 3.0)).step_s(10) == 5.0 and Trial((2,), (1.0,)).step_s(2) == 1.0
    assert Trial((2, 6), (1.0, 0.9)).step_s(10) == 1.0  # deeper is never faster
    (tmp_path / "tq-trial-killed").mkdir()  # by somebody, in the middle of a trial
    for run in (run_of(tmp_path, inputs="place"), run_of(None)):
        tried = trial(run, seconds=0.0)
        assert len(tried.seconds) == 2 and min(tried.seconds) > 0
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_a_trial_of_six_layers_says_about_what_24_take(tmp_path: Path) -> None:
    tried = trial(run_of(tmp_path, layers=24, inputs="place"))
    with StreamedTrainer(run_of(None, 24).model, CORPUS, CONFIG, tmp_path, inputs="place", impl="reference") as trainer:
        took = []
        for _ in range(8):
            trainer.step()
            assert trainer.work is not None
            took.append(trainer.work.seconds)
    assert 0.3 < tried.step_s(24) / sorted(took)[4] < 3  # other tests run beside it; six layers alone would be 0.25


def test_a_trial_that_would_take_long_is_left_out(tmp_path: Path) -> None:
    short, long = (forecast(run_of(tmp_path), most_s=most) for most in (1e9, 0.0))
    assert long.trial is None and long.step_s == long.step.seconds() > 0
    assert short.trial is not None and short.step_s == short.trial.step_s(10)
    with pytest.raises(OSError):  # what is refused there is told here
        forecast(run_of(tmp_path / "none"))


def test_a_trial_without_room_leaves_the_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Run) -> Trial:
        raise OSError("no space left on device")

    monkeypatch.setattr(trials, "trial", full)
    sent: list[Any] = []
    trials._apart(run_of(tmp_path), 1e9, 1, os.getppid(), SimpleNamespace(send=sent.append))  # type: ignore[arg-type]
    assert sent[0].trial is None and sent[0].step_s > 0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="there are no large pages here")
def test_buffers_ask_for_large_pages_and_start_at_a_page() -> None:
    for nbytes, start in ((PAGE, PAGE), (3 << 20, PAGE), ((4 << 20) + PAGE, 2 << 20)):
        buffer = buffer_of(nbytes).fill_(7)
        assert buffer.nbytes == nbytes and buffer.data_ptr() % start == 0 and int(buffer[-1]) == 7
    buffer = buffer_of(16 << 20)
    at, flags = buffer.data_ptr() + (2 << 20), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert "hg" in flags.split()
