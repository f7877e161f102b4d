"""One place for what every test shares: Hypothesis profiles and one thread per process."""

import os
import sys

import hypothesis
import pytest
import torch

_CALM = dict(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
# The same examples on every run: a red run can be repeated. `make soak` draws new ones.
hypothesis.settings.register_profile("default", derandomize=True, **_CALM)
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True, **_CALM)
hypothesis.settings.register_profile("soak", max_examples=2000, print_blob=True, **_CALM)


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles as if it were the first: a process compiles one function eight times only, so that
    whether a test passed hung on how many others of its worker had compiled a GPT."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def pytest_configure(config: pytest.Config) -> None:
    in_ci = os.environ.get("CI", "").lower() in ("1", "true", "yes")
    soak = config.getoption("markexpr", "") == "soak"
    hypothesis.settings.load_profile("soak" if soak else "ci" if in_ci else "default")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
