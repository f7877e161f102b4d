"""Steps under a hard limit of memory by the fastest plan for a batch that is given, not the largest that fits."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tq.lab.ceiling_study import _ENVIRONMENT, PLANNED, batch_of
from tq.train.model import GPT, GPTConfig
from tq.train.planned.plan import priced_trace
from tq.train.planned.within import within_peak


def fits_within(task: Mapping[str, Any], device: str = "cpu") -> dict[str, Any]:
    """As ``ceiling_study.fits``, by the plan of ``within_peak``: {"fits": ..., "seconds": ..., "peak": planned bytes}.

    task: as there but for "method"; "share" of the ceiling that the plan may take, as gradients need some of it.
    """
    config = GPTConfig(**task["shape"])
    ids = batch_of(config, task["sequences"])
    priced = priced_trace(GPT(config), (ids, ids), repeats=1, progress=False)
    plan = within_peak(priced, int(task["share"] * task["ceiling"]))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "plan").write_bytes(pickle.dumps(plan))
        given = dict(task) | {"method": PLANNED, "plan": str(Path(folder, "plan"))}
        done = subprocess.run(
            [sys.executable, "-m", "tq.lab.ceiling_study", json.dumps(given)],
            capture_output=True, text=True, env={**os.environ, **_ENVIRONMENT}, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the process under a ceiling failed: {done.stderr[-500:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"peak": plan.peak_bytes}
