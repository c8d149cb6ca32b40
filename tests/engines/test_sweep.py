"""Many runs with one program: each the same as on its own."""

import numpy as np
import pytest

import fedbilevel as fb
from tests.references.compare import identical, refusals
from tests.references.quadratic import quadratic

reference = quadratic()
data = reference.data()
algorithm = fb.fedbio(
    reference.problem(), fb.neumann(1, 0.5), inner_step=0.4, outer_step=0.3, local_steps=2, batch_size=3
)
ROUNDS = 4


def run(**options):
    return fb.sweep(algorithm, data, ROUNDS, diagnostics="cheap", **options)


@pytest.fixture(scope="module")
def found():
    return run(seeds=[0, 7], outer_step=[0.1, 0.3], hypergradient_step=[0.2, 0.6], record_every=2)


def test_equals_separate_runs_bit_for_bit(found):
    assert len(found.results) == 8
    for result, row in zip(found.results, found.table.to_dict("records"), strict=True):
        hypergradient = fb.neumann(1, row["hypergradient_step"])
        settings = {"inner_step": 0.4, "outer_step": row["outer_step"], "local_steps": 2, "batch_size": 3}
        single = fb.fedbio(reference.problem(), hypergradient, **settings)
        alone = fb.simulate(single, data, ROUNDS, seed=int(row["seed"]), diagnostics="cheap", record_every=2)
        identical((result.outer, result.inner), (alone.outer, alone.inner))
        swept = {name: row[name] for name in ("outer_step", "hypergradient_step")}
        assert result.hyper == {"inner_step": 0.4, **swept}
        kept, wanted = (frame.drop(columns="seconds").to_dict("list") for frame in (result.history, alone.history))
        assert kept == wanted


def test_tables(found):
    labels = found.table[["seed", "outer_step", "hypergradient_step"]].to_numpy().tolist()
    assert labels == [[s, o, h] for o in (0.1, 0.3) for h in (0.2, 0.6) for s in (0, 7)]
    assert found.table["round"].tolist() == [4] * 8
    assert not found.table["diverged"].any()
    assert len(found.history) == 8 * 3
    assert found.outer.shape == (8, 3)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_do_not_matter(found, workers):
    other = run(seeds=[0, 7], outer_step=[0.1, 0.3], hypergradient_step=[0.2, 0.6], record_every=2, workers=workers)
    identical(other.outer, found.outer)


def test_a_diverging_run_is_flagged_and_the_others_stay():
    both = run(seeds=[0], outer_step=[0.3, 1e200])
    assert both.table["diverged"].tolist() == [False, True]
    assert both.results[0].diverged is None
    assert "outer_step=1e+200" in both.results[1].diverged
    identical(both.results[0].outer, run(seeds=[0], outer_step=[0.3]).results[0].outer)


def test_progress_counts_runs():
    told = []
    run(seeds=[0, 1, 2], progress=told.append)
    assert [(one.done, one.rounds) for one in told] == [(1, 3), (2, 3), (3, 3)]


test_bad_arguments = refusals(
    lambda options: run(**options),
    ({"seeds": []}, "sweep needs at least one seed"),
    ({"seeds": 5}, "seeds must be", TypeError),
    ({"seeds": [0.5]}, "seed.* must be .*whole number", TypeError),
    ({"seeds": [-1]}, "seed must be at least 0, not -1"),
    ({"outer_step": []}, "outer_step needs at least one value"),
    ({"outer_step": 0.1}, "outer_step must be .*list", TypeError),
    ({"outer_step": [0.1, -0.1]}, "outer_step must be a positive number, not -0.1"),
    ({"outerstep": [0.1]}, "fedbio has no float hyper-parameter 'outerstep'; did you mean 'outer_step'"),
    ({"local_steps": [1]}, "fedbio has no float hyper-parameter 'local_steps'"),
    ({"workers": 0}, "workers must be at least 1, not 0"),
)


def test_a_fedavg_model_is_not_a_hyper_parameter():
    """A first model that happens to be one number is data, not a step size."""
    tiny = fb.fedavg(lambda model, batch: (model - batch[0]) ** 2, init=np.zeros(()), step=0.1)
    with pytest.raises(ValueError, match="fedavg has no float hyper-parameter 'start'; there are 'step'"):
        fb.sweep(tiny, fb.ClientData(train=np.ones((1, 1))), 1, start=[1.0])
