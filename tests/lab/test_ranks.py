"""Several processes of one group: all wait for one slow writer, and runs repeat bit for bit."""

import pytest

from tq.lab import ranks


@pytest.mark.xdist_group("ranks")
def test_all_wait_for_one_slow_writer():
    waited = ranks.one_slow_writer(2, 1.0)
    assert len(waited) == 2 and min(waited) > 0.95


@pytest.mark.xdist_group("ranks")
def test_a_run_repeats_and_depends_on_the_number_of_ranks():
    one, again = (ranks.digests_of_runs(2, 2, sequences=4) for _ in range(2))
    assert one == again and len(set(one)) == 1
    assert ranks.digests_of_runs(2, 2, seed=1, sequences=4) != one
