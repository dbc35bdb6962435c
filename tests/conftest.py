"""Shared by all tests: quiet, repeatable hypothesis; the global generators must stay untouched."""

import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedlamb", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("fedlamb")


@pytest.fixture(autouse=True)
def global_random_state_is_untouched():
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    yield
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert before[2] == random.getstate()
