"""Live bytes: a tensor counts while it lives, a resized one with its size, and layouts hold what the formula says."""

from __future__ import annotations

import torch

from tq.lab import layout_live


def test_tensors_count_while_they_live() -> None:
    before = torch.ones(1000)
    with layout_live.Live() as live:
        assert live.bytes() == 0
        x = torch.ones(1000)
        y = x.view(10, 100) * 2
        assert live.bytes() == 8000  # a view is no memory of its own
        del x
        assert live.bytes() == 4000
        y.untyped_storage().resize_(0)
        assert live.bytes() == 0
        before.add_(1)
        assert live.bytes() == 4000


def test_layouts_hold_what_the_formula_says() -> None:
    names = ["DP", "ZeRO-3", "PP, 1F1B"]
    found = layout_live.live({"ranks": 2, "names": names})
    for name in names:
        for moment in layout_live.MOMENTS:
            each = found[name][moment]
            assert abs(each["live"] / each["formula"] - 1) < 0.05, (name, moment, each)
    # a formula that forgets what the forward pass keeps would not pass
    assert found["ZeRO-3"]["forward"]["live"] > 2 * found["ZeRO-3"]["rest"]["live"]
