"""What a kernel keeps a GPU busy with, by the card's own counters, read by NVIDIA's Nsight Compute (``ncu``).

    python -m tq.lab.gpu_counters '[{"bits": 4, "rounds": 1, "dtype": "bfloat16"}]'    the launches that are profiled
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from tq.quant.codec import Codec

_PIPE = "sm__inst_executed_pipe_{}.avg.pct_of_peak_sustained_active"
BUSY = {  # percent of what each can do, while the kernel runs
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "second level": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "integers and logic": _PIPE.format("alu"),
    "products and sums": _PIPE.format("fma"),
    "loads and stores": _PIPE.format("lsu"),
    "special functions": _PIPE.format("xu"),
}
OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
WAITS = {  # cycles that a warp waits between two of its instructions, by what for
    "memory": "long_scoreboard",
    "shared memory or special functions": "short_scoreboard",
    "a busy pipe": "math_pipe_throttle",
    "an earlier result": "wait",
    "its turn": "not_selected",
    "room to load or store": "lg_throttle",
    "room for shuffles": "mio_throttle",
    "other warps": "barrier",
    "instructions": "no_instruction",
}
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TIME = "gpu__time_duration.sum"
METRICS = [*BUSY.values(), OCCUPANCY, *(STALL.format(each) for each in WAITS.values()), TIME]
VERBS = ("encode", "decode")
LARGE = 1 << 26  # numbers that are encoded


def ncu() -> str | None:
    """Where the profiler is; None where it is not."""
    found = shutil.which("ncu")
    places = [*Path("/usr/local").glob("cuda*/bin/ncu"), *Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
    return found or next((str(place) for place in sorted(places, reverse=True)), None)


def told(codec: Codec, dtype: torch.dtype) -> dict[str, Any]:
    """A setting as JSON values: what ``Codec`` is made from, and "dtype"."""
    given = {each.name: getattr(codec, each.name) for each in fields(codec) if each.init}
    kept = {name: value for name, value in given.items() if isinstance(value, int | float | str | None)}
    return kept | {"dtype": str(dtype).removeprefix("torch.")}


def busy(settings: Sequence[Mapping[str, Any]], timeout_s: float = 120.0) -> list[dict[str, dict[str, float]]] | None:
    """For each setting {"encode": {metric: value}, "decode": ...}, one launch of each; None where ncu reads nothing.

    settings: as ``told`` gives them.
    """
    where = ncu()
    if where is None:
        return None
    command = [
        where, "--csv", "--page", "raw", "--clock-control", "none", "--kernel-name", "regex:_(en|de)code_kernel",
        "--metrics", ",".join(METRICS), sys.executable, "-m", __name__, json.dumps([dict(each) for each in settings]),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"ncu: {error}", getattr(error, "stdout", None), getattr(error, "stderr", None), file=sys.stderr)
        return None
    rows = read(done.stdout)
    if len(rows) != len(VERBS) * len(settings):
        print(f"ncu told of {len(rows)} launches, not of {len(VERBS) * len(settings)}", file=sys.stderr)
        return None
    return [dict(zip(VERBS, rows[at : at + 2], strict=True)) for at in range(0, len(rows), 2)]


def read(text: str) -> list[dict[str, float]]:
    """{metric: value} of each launch, in order, from ncu's raw page as CSV, whose second row holds the units."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]
    return [{name: float(row[name].replace(",", "")) for name in METRICS if row.get(name)} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    """Encodes and decodes once in each setting, on a GPU."""
    given = sys.argv[1:] if arguments is None else arguments
    if len(given) != 1 or given[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    x = torch.randn(LARGE, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    for setting in json.loads(given[0]):
        codec, dtype = Codec(**{k: v for k, v in setting.items() if k != "dtype"}), getattr(torch, setting["dtype"])
        typed = x.to(dtype)
        codec.decode(codec.encode(typed), out=torch.empty_like(typed))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
