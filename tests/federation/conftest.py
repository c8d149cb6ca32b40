"""Shared pieces of the federation's tests: one compilation per algorithm in a process, one federation of processes."""

import jax
import pytest

from fedbilevel.engines.checkpoint import fingerprint
from fedbilevel.federation.protocol import coordinator, site
from fedbilevel.federation.protocol.compiled import Compiled

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


@pytest.fixture(scope="session")
def federation(tmp_path_factory):
    """A server and three sites, up for all tests that need them: starting takes longer than most of what they do.

    The server is a hostile one: its own rules allow everything, so that whatever is refused is refused by the sites.
    """
    from tests.federation.federation import SITES, Federation
    from tests.federation.hostile import allow_everything

    made = Federation(tmp_path_factory.mktemp("federation"))
    try:
        allow_everything(made.kits.server / "local")
        with pytest.MonkeyPatch.context() as patched:
            for name in ("FEDBILEVEL_TEST_PASSWORD", "NVIDIA_API_KEY", "AWS_SECRET_ACCESS_KEY"):
                patched.setenv(name, "of whoever starts the processes")
            made.start("server", *SITES)
        made.ready(*SITES)
        yield made
    finally:
        made.stop()
