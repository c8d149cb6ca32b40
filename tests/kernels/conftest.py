import pytest

from fedbilevel import kernels


@pytest.fixture(autouse=True)
def _kernels_are_available():
    if kernels.why_not() is not None:
        pytest.skip(kernels.why_not())
