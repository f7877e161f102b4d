"""A hook's state is made where there is no process group yet, and works as the one that needs it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.helpers import values
from tests.distributed.test_collectives import batch, digest, model
from tq import Codec
from tq.train import collectives
from tq.train.hooks import HookState, ddp_hook


def gradients(rank: int, ranks: int, pickled: bytes | None) -> Any:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.01)
    state = collectives.HookState(Codec(4, block=64), warmup=0) if pickled is None else pickle.loads(pickled)
    state.load_state_dict({"step": 7})
    wrapped.register_comm_hook(state, ddp_hook)
    for step in range(2):
        wrapped(batch(step, rank), rare=True).square().mean().backward()
    return {"step": state.step, "digest": digest(*(p.grad for p in wrapped.parameters()))}


@pytest.mark.xdist_group("ranks")
def test_a_state_is_made_before_the_group(tmp_path: Path) -> None:
    pickled = pickle.dumps(HookState(Codec(4, block=64), warmup=0))
    found = values(2, tmp_path / "before", gradients, pickled)
    assert found[0] == found[1] and found[0]["step"] == 9
    assert found == values(2, tmp_path / "after", gradients, None)


def test_errors() -> None:
    for bad in (-1, True, 2.0):
        with pytest.raises(ValueError, match="warmup must be an integer >= 0"):
            HookState(Codec(), warmup=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one block"):
        HookState((Codec(), Codec(block=64)))
    with pytest.raises(RuntimeError, match="init_process_group"):
        torch.as_tensor(HookState(Codec()).channel)
    state = HookState(Codec(4), warmup=3)
    again = pickle.loads(pickle.dumps(state))
    assert again.codecs == state.codecs and again.warmup == 3 and again.state_dict() == {"step": 0}
