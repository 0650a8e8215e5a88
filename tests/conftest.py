"""Settings of the whole suite: GPU tests are skipped with the reason, and Hypothesis and torch draw alike in every run."""

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Derandomised, so that a run in CI repeats; HYPOTHESIS_PROFILE=thorough is for a person who looks for more.
settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _torch_draws_alike() -> None:
    """Each test finds torch's generator in the same state, whatever ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(2026)


def _gpu_missing() -> str | None:
    """Why GPU tests cannot run here, or None."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no NVIDIA GPU is visible to torch"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none; torch is asked only when such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = _gpu_missing() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
