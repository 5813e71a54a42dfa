"""What every test needs; fixtures of one area live beside its tests."""

import os

# One thread per worker: two run at a time on small tensors. OpenMP reads this when torch loads it.
os.environ.setdefault('OMP_NUM_THREADS', '1')

import pytest
import torch

torch.set_num_threads(1)

pytest_plugins = ['tests.triton_support.plugin']


def pytest_runtest_setup(item: pytest.Item) -> None:
    # The same numbers whatever ran before. PyTorch's manual_seed would also ask each kind of device.
    torch.default_generator.manual_seed(0)
    # Asked only by a test that needs it: looking for a GPU may start its driver, which a later fork does not survive.
    if item.get_closest_marker('gpu') and not torch.accelerator.is_available():
        pytest.skip('no accelerator')
