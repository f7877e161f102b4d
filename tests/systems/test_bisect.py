"""The search for the largest size that fits."""

import pytest

from tq.systems.bisect import largest


@pytest.mark.parametrize("end", [0, 1, 2, 3, 7, 8, 9, 100, 1023, 1024, 5000])
def test_finds_the_end_in_few_calls(end: int) -> None:
    asked: list[int] = []

    def fits(n: int) -> bool:
        asked.append(n)
        return n <= end

    assert largest(fits) == end
    assert len(asked) <= 2 * max(1, end).bit_length() + 1 and len(set(asked)) == len(asked)


@pytest.mark.parametrize("most", [1, 2, 6, 100])
def test_never_asks_beyond_the_most(most: int) -> None:
    def fits(n: int) -> bool:
        assert n <= most
        return True

    assert largest(fits, most) == most


def test_refuses_a_limit_below_one() -> None:
    with pytest.raises(ValueError, match="most=0"):
        largest(lambda n: True, 0)
