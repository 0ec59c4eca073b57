"""Settings of the exact-law tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """Thousands of calls on small tensors: threads cost more here than they give."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
