"""The Triton kernels compile without a GPU, and keep in registers what should stay there."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("gpu_variants.py")
ROOT = SCRIPT.parents[2]
_spec = importlib.util.spec_from_file_location("gpu_variants", SCRIPT)
assert _spec and _spec.loader
gpu_variants = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = gpu_variants
_spec.loader.exec_module(gpu_variants)
NAMES = [gpu_variants.variant_name(v) for v in gpu_variants.VARIANTS + gpu_variants.ADAMW]


def compile_all(*targets: str) -> list[dict[str, Any]]:
    """In a process of its own, as Triton may interpret in this one; cached, as `make clean` knows _build."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(ROOT / "_build" / "triton")}
    command = [sys.executable, str(SCRIPT), "compile", *targets]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, str], dict[str, Any]]:
    return {(r["target"], r["name"]): r for r in compile_all("90") + compile_all("80", "4")}


@pytest.mark.parametrize(("target", "name"), [(90, name) for name in NAMES] + [(80, name) for name in NAMES[:4]])
def test_nothing_spills(found: dict[tuple[int, str], dict[str, Any]], target: int, name: str) -> None:
    result = found[target, name]
    assert result["registers"] <= 255 and result["shared_bytes"] <= 48 * 1024
    # The tile nearly fills the registers of a thread; ptxas of older releases puts a few of them on the stack.
    allowed = 0 if target == 90 and result["triton"] >= [3, 7] else 512
    assert result["spills"] <= allowed, result
