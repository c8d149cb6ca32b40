"""Shared pieces of the federation's tests: one compilation per algorithm, however many sites there are in a process."""

import jax
import pytest

from fedbilevel.engines.nvflare import coordinator, site
from fedbilevel.engines.nvflare.compiled import Compiled

_made = {}


@pytest.fixture
def shared_compilation(monkeypatch):
    """Sites in one process share what separate machines compile for themselves."""

    def compiled(algorithm, seed, example):
        settings = algorithm.settings
        steps = tuple(getattr(settings, name, None) for name in ("local_steps", "batch_size", "previous"))
        kinds = tuple(str(leaf.dtype) for leaf in jax.tree.leaves(example))
        return _made.setdefault((algorithm.name, seed, steps, kinds), Compiled(algorithm, seed, example))

    monkeypatch.setattr(site, "Compiled", compiled)
    monkeypatch.setattr(coordinator, "Compiled", compiled)
