"""Setup of every test. Fixtures of one area are beside its tests."""

import os

# One thread per worker: two workers run at a time, on small tensors. OpenMP reads this when torch loads it.
os.environ.setdefault('OMP_NUM_THREADS', '1')

import pytest
import torch

torch.set_num_threads(1)

pytest_plugins = ['tests.tiers', 'tests.triton_support.plugin']


def pytest_runtest_setup(item: pytest.Item) -> None:
    # The same random numbers whatever ran before. PyTorch's manual_seed would also query each kind of device.
    torch.default_generator.manual_seed(0)
    # Queried only for a test that needs a GPU: the query may start the driver, which a later fork does not survive.
    if item.get_closest_marker('gpu') and not torch.accelerator.is_available():
        pytest.skip('no accelerator')
