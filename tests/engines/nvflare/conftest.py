"""Shared pieces of the federation's tests: one compilation per algorithm, however many sites there are in a process."""

import jax
import pytest

from fedbilevel.engines.checkpoint import fingerprint
from fedbilevel.engines.nvflare import coordinator, site
from fedbilevel.engines.nvflare.compiled import Compiled

_made = {}


@pytest.fixture
def shared_compilation(monkeypatch):
    """Sites in one process share what separate machines compile for themselves."""

    def compiled(algorithm, seed, example):
        shapes = str(jax.tree.map(lambda leaf: (leaf.shape[1:], str(leaf.dtype)), example))
        key = (fingerprint(algorithm.name, algorithm.settings, {}, ()), seed, shapes)
        if key not in _made:
            _made[key] = Compiled(algorithm, seed, example)
        return _made[key]

    monkeypatch.setattr(site, "Compiled", compiled)
    monkeypatch.setattr(coordinator, "Compiled", compiled)
