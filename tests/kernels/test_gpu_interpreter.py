"""The Triton kernels against the reference: in Triton's interpreter on the CPU, and on a GPU where there is one.

The interpreter has to be chosen before Triton is imported, so one child process runs the cases; every case is a test.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("gpu_variants.py")
_spec = importlib.util.spec_from_file_location("gpu_variants", SCRIPT)
assert _spec and _spec.loader
gpu_variants = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = gpu_variants  # dataclasses look their module up
_spec.loader.exec_module(gpu_variants)


@pytest.fixture(scope="module")
def interpret() -> Iterator[Callable[[int], str | None]]:
    """Runs case number i in the child (below 0: of ``EXTRA``); None, or the traceback."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = [sys.executable, str(SCRIPT), "parity"]
    with subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin and child.stdout
        stdin, stdout = child.stdin, child.stdout

        def run(i: int) -> str | None:
            stdin.write(f"{i}\n")
            stdin.flush()
            line = stdout.readline()
            assert line, "the interpreter's process died"
            answer: str | None = json.loads(line)
            return answer

        yield run
        stdin.close()
        child.wait()


@pytest.mark.parametrize("i", range(len(gpu_variants.CASES)), ids=[c.name for c in gpu_variants.CASES])
def test_parity_interpreted(interpret: Callable[[int], str | None], i: int) -> None:
    problem = interpret(i)
    assert problem is None, problem


@pytest.mark.parametrize("i", gpu_variants.EXTRA, ids=lambda i: gpu_variants.EXTRA[i].__name__)
def test_the_rest_interpreted(interpret: Callable[[int], str | None], i: int) -> None:
    problem = interpret(i)
    assert problem is None, problem


@pytest.mark.gpu
def test_parity_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU: none here")
    for also in gpu_variants.EXTRA.values():
        also("cuda")
    gpu_variants.check_graph()
    problems = []
    for case in gpu_variants.CASES:
        try:
            gpu_variants.check(case, "cuda")
        except AssertionError as error:
            problems.append(f"{case.name}: {error}")
    assert not problems, "\n".join(problems)


def test_cpu_tensors_are_refused() -> None:
    from tq.kernels import gpu

    x, payload, scale = torch.ones(1, 128), torch.zeros(1, 64, dtype=torch.uint8), torch.ones(1)
    signs, levels, thresholds = torch.ones(1, 128), torch.arange(16.0), torch.arange(15.0)
    with pytest.raises(RuntimeError, match="CUDA tensors"):
        gpu.encode(
            x, payload, scale, signs_RB=signs, levels_L=levels, thresholds=thresholds, search=((1.0,), (), ()), bits=4,
            scale="mse",
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="CUDA tensors"):
        gpu.decode(payload, scale, x, signs_RB=signs, levels_L=levels, bits=4)


def test_no_cell_holds_two_thresholds() -> None:
    """Which is what makes one comparison enough; the kernel's arithmetic in fp32, for every codebook of the codec."""
    from tq.kernels import gpu
    from tq.quant.codebook import lloyd_max

    for dim in (None, 64, 128, 256, 512, 1024):
        for bits in range(2, 9):
            t = torch.tensor(lloyd_max(bits, dim)[1], dtype=torch.float32)
            cells = ((t * (0.5 / t[-1]) + 0.5).clamp(0, 1) * (gpu._cell_count(bits) - 1)).round()
            assert bool((cells.diff() >= 1).all()), (dim, bits)
