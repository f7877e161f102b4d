"""Bubbles: the figures of the paper, and schedules played out task by task."""

import pytest

from tq.systems import pipeline

Task = tuple[str, int, int]  # "f" or "b", micro-batch, chunk of the stage


def gpipe(rank: int, p: int, m: int, v: int) -> list[Task]:
    return [("f", i, 0) for i in range(m)] + [("b", i, 0) for i in range(m)]


def one_forward_one_backward(rank: int, p: int, m: int, v: int) -> list[Task]:
    """Narayanan et al. 2021, figure 4; interleaved where v > 1, m a multiple of p."""
    ahead = min(m * v, (p - rank - 1) * 2 + (v - 1) * p if v > 1 else p - rank - 1)

    def task(kind: str, k: int) -> Task:
        chunk = k // p % v
        return kind, k // (p * v) * p + k % p, chunk if kind == "f" else v - 1 - chunk

    order = [task("f", k) for k in range(ahead)]
    for k in range(m * v):
        order += [task("f", k + ahead)] if k + ahead < m * v else []
        order += [task("b", k)]
    return order


def idle_share(schedule: object, p: int, m: int, v: int = 1, forward: float = 1.0, backward: float = 2.0) -> float:
    """Idle share of all stages until the last task ends; a task starts when its stage is free and its input there."""
    queues = [list(schedule(rank, p, m, v)) for rank in range(p)]  # type: ignore[operator]
    done: dict[tuple[Task, int], float] = {}
    free = [0.0] * p

    def needs(task: Task, rank: int) -> tuple[Task, int] | None:
        kind, i, c = task
        where = c * p + rank + (-1 if kind == "f" else 1)
        if where < 0:
            return None
        return (("f", i, c), rank) if where == p * v else ((kind, i, where // p), where % p)

    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and ((need := needs(queue[0], rank)) is None or need in done):
                took = (forward if queue[0][0] == "f" else backward) / v
                free[rank] = max(free[rank], done[need] if need else 0.0) + took
                done[queue.pop(0), rank] = free[rank]
    return 1 - m * (forward + backward) / max(free)


@pytest.mark.parametrize(("p", "m"), [(1, 4), (2, 2), (4, 8), (8, 8), (8, 10), (8, 64)])
def test_gpipe_and_1f1b_idle_by_the_formula(p: int, m: int) -> None:
    wanted = pipeline.bubble_share(p, m)
    assert idle_share(gpipe, p, m) == pytest.approx(wanted)
    assert idle_share(one_forward_one_backward, p, m) == pytest.approx(wanted)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (8, 16, 4)])
def test_interleaving_divides_the_bubble(p: int, m: int, v: int) -> None:
    assert idle_share(one_forward_one_backward, p, m, v) == pytest.approx(pipeline.bubble_share(p, m, v))


def test_the_papers_figures() -> None:
    # Narayanan et al. 2021, figures 3 and 4: 4 stages, 8 micro-batches, then 2 chunks a device
    assert pipeline.bubble_over_work(4, 8) == 3 / 8 and pipeline.bubble_over_work(4, 8, 2) == 3 / 16
    # Huang et al. 2019, section 2.3: negligible from four micro-batches a stage on; (K - 1) / (M + K - 1)
    assert pipeline.bubble_share(8, 32) == pytest.approx(7 / 39)
    assert pipeline.bubble_s(4, 2.5, 2) == pytest.approx(3.75)


def test_the_micro_batches_for_a_share_give_that_share() -> None:
    assert pipeline.micro_batches_for(0.4, 8) == pytest.approx(1.5 * 7)
    assert pipeline.bubble_share(9, round(pipeline.micro_batches_for(0.2, 9, 2)), 2) == pytest.approx(0.2)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="stages must be an int of at least 1, got 0"):
        pipeline.bubble_share(0, 4)
    with pytest.raises(ValueError, match="share must be positive and at most 1, got 1.5"):
        pipeline.micro_batches_for(1.5, 8)
