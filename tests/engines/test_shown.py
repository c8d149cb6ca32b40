"""What people see of runs: short words in a console and a notebook, curves, a bar; none of it changes a number."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.progress import progress_lines
from tests.references.compare import identical, refusals
from tests.references.quadratic import quadratic

reference = quadratic()
data = reference.data()
algorithm = fb.fedbio(reference.problem(), fb.neumann(1, 0.5), 0.4, 0.3, local_steps=2, batch_size=3)


def sweep(**options):
    steps = {"outer_step": [0.1, 0.3]}
    return fb.sweep(algorithm, data, 3, seeds=range(2), diagnostics="cheap", record_every=1, **steps, **options)


@pytest.fixture(scope="module")
def result():
    return fb.simulate(algorithm, data, 5, seed=3, diagnostics="cheap")


@pytest.fixture(scope="module")
def swept():
    return sweep()


def test_short_words_instead_of_arrays(result, swept):
    assert repr(result).startswith("Result(5 rounds, seed 3; objective ")
    assert f"outer float64[{reference.problem().init(None)[0].shape[0]}])" in repr(result)
    assert repr(swept) == "Sweep(4 runs: 2 of seed, 2 of outer_step)"
    ragged = fb.ClientData.from_clients([({"a": np.ones((n, 2))}, {"a": np.ones((1, 2))}) for n in (3, 1200)])
    row = "rows of {a: float64[2]}"
    assert repr(ragged) == f"ClientData(2 clients; train 3 to 1,200 {row}; val 1 {row})"
    for one in (result, swept, ragged):
        assert "<table" in one._repr_html_()
        assert len(repr(one)) < 150
    assert repr(fb.simulate(algorithm, data, 1, record_every=None)).startswith("Result(1 rounds, seed 0; outer ")


def test_curves_are_the_histories(result, swept):
    axes = fb.plot(result, swept, labels=["one", "many"])
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    assert told == ["one", "many, outer_step=0.1", "many, outer_step=0.3"]
    first, *others = axes.get_lines()
    np.testing.assert_array_equal(first.get_xydata(), result.history[["round", "objective"]])
    assert len(others) == 4
    assert len({line.get_color() for line in others}) == 2, "seeds of a combination share a colour"
    with pytest.raises(ValueError, match=r"no column 'objektive'; did you mean 'objective'\?"):
        result.plot("objektive")
    alone = result.plot("bytes_up", against="step", ax=axes)
    assert alone is axes
    np.testing.assert_array_equal(axes.get_lines()[-1].get_xydata(), result.history[["step", "bytes_up"]])


test_what_cannot_be_drawn_is_said = refusals(
    lambda draw: draw(fb.simulate(algorithm, data, 1, record_every=None)),
    (lambda one: one.plot(), "recorded nothing"),
    (lambda one: fb.plot(), "plot needs a run", TypeError),
    (lambda one: fb.plot(one, labels=["a", "b"]), "labels names 2 runs, but there are 1"),
    (lambda one: fb.plot(one.outer), "plot takes results of simulate and sweep", TypeError),
    (lambda one: fb.simulate(algorithm, data, 1, progress="yes"), "progress must be True or a function", TypeError),
)


def test_without_matplotlib_one_sentence(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"Figures need matplotlib: install it with .*fedbilevel\[report\]"):
        result.plot()


def test_a_bar_changes_no_number(result, swept, capsys):
    with_bar = fb.simulate(algorithm, data, 5, seed=3, diagnostics="cheap", progress=True)
    identical((with_bar.outer, with_bar.inner, with_bar.server), (result.outer, result.inner, result.server))
    assert capsys.readouterr().err == "fedbio: 5/5\n"
    identical(sweep(progress=True).outer, swept.outer)
    assert capsys.readouterr().err == "fedbio, runs: 4/4\n"


def test_a_notebook_gets_a_bar_of_its_own(monkeypatch):
    drawn = []
    display = ModuleType("IPython.display")
    display.HTML = str
    display.display = lambda shown, display_id: SimpleNamespace(update=drawn.append)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    bars = progress_lines()
    bars.console = SimpleNamespace(is_jupyter=True)
    with bars as report:
        report("a<b", 1, 2)
        report("c", 2, 2)
    assert drawn[0].startswith('<div>a&lt;b <progress value="1" max="2"')
    assert drawn[1].count("<progress") == 2
