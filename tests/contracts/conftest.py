import jax
import numpy as np
import pytest


@pytest.fixture(scope="module")
def compiled():
    """Names of everything XLA compiled, in order."""
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **about: events.append(event) if event.endswith("backend_compile_duration") else None
    )
    jax.jit(lambda x: x + 1)(np.arange(3.0))
    assert events, "the listener must hear a compilation"
    return events
