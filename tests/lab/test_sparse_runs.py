"""Arms of the comparison with deep gradient compression, and its messages on processes."""

import math

import pytest

from tq.lab import sparse_runs
from tq.systems.synchronisation import sparse_bytes, sparse_factor

SHORT = {"steps": 24, "warmup": 4, "every": 10, "evaluated": 1, "max_bytes": 300_000, "lr": 1e-3}


@pytest.mark.xdist_group("ranks")
def test_messages_have_their_bytes_on_processes() -> None:
    found = sparse_runs.gathered(2, 100_000)
    assert found["agree"] and found["bytes"] == sparse_bytes(100_000, 2, 0.001)


@pytest.mark.parametrize("arm", sparse_runs.ARMS)
def test_every_arm_learns_and_counts_its_bytes(arm: str) -> None:
    found = sparse_runs.train(SHORT | {"arm": arm, "lr": 0.1 if "sgd" in arm else 1e-3})
    assert found["valid"] < 5.3
    if arm in ("exact", "sgd"):
        assert found["fewer"] == found["fewer_after"] == pytest.approx(1)
    if arm == "ours":
        assert found["fewer"] == pytest.approx(7.53, abs=0.05)
    if arm.startswith("dgc"):  # 0.1 % of the matrices, at least one each, and the vectors in fp32
        assert 100 < found["fewer_after"] < sparse_factor(4, 0.001)
        assert found["fewer"] < 0.2 * found["fewer_after"]
    if arm == "diloco":
        assert found["fewer_after"] == pytest.approx(75.3, rel=0.01)


def test_arms_and_refusals() -> None:
    arms = sparse_runs.arms(sparse_runs.SparseRun(seed=3))
    assert list(arms) == list(sparse_runs.ARMS) and all(run.arm == name and run.seed == 3 for name, run in arms.items())
    with pytest.raises(ValueError, match="arm"):
        sparse_runs.train(SHORT | {"arm": "none"})


def test_a_run_that_explodes_is_none() -> None:
    assert not math.isfinite(sparse_runs.train(SHORT | {"arm": "sgd", "lr": 1e30})["valid"])
