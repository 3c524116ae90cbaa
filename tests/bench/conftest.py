"""Benchmarks of small shapes: threads cost more than they bring."""

import pytest
import torch

from tests.examples.conftest import media_checkpoint as media_checkpoint  # a fixture


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
