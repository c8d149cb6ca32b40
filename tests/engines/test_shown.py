"""What people see of runs: short words in a console and a notebook, curves, a bar; none of it changes a number."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.engines.progress import progress_lines
from tests.references.compare import identical
from tests.references.quadratic import quadratic

reference = quadratic()
data = reference.data()
algorithm = fb.fedbio(reference.problem(), fb.neumann(1, 0.5), 0.4, 0.3, local_steps=2, batch_size=3)


@pytest.fixture(scope="module")
def result():
    return fb.simulate(algorithm, data, 5, seed=3, diagnostics="cheap")


@pytest.fixture(scope="module")
def swept():
    return fb.sweep(algorithm, data, 3, seeds=range(2), diagnostics="cheap", record_every=1, outer_step=[0.1, 0.3])


def test_short_words_instead_of_arrays(result, swept):
    assert repr(result).startswith("Result(5 rounds, seed 3; objective ")
    assert f"outer float64[{reference.problem().init(None)[0].shape[0]}])" in repr(result)
    assert repr(swept) == "Sweep(4 runs: 2 of seed, 2 of outer_step)"
    ragged = fb.ClientData.from_clients([({"a": np.ones((n, 2))}, {"a": np.ones((1, 2))}) for n in (3, 1200)])
    assert (
        repr(ragged) == "ClientData(2 clients; train 3 to 1,200 rows of {a: float64[2]}; val 1 rows of {a: float64[2]})"
    )
    for one in (result, swept, ragged):
        assert "<table" in one._repr_html_()
        assert len(repr(one)) < 150
    assert repr(fb.simulate(algorithm, data, 1, record_every=None)).startswith("Result(1 rounds, seed 0; outer ")


def test_curves_are_the_histories(result, swept):
    axes = fb.plot(result, swept, labels=["one", "many"])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "one",
        "many, outer_step=0.1",
        "many, outer_step=0.3",
    ]
    first, *others = axes.get_lines()
    np.testing.assert_array_equal(first.get_xydata(), result.history[["round", "objective"]])
    assert len(others) == 4
    assert len({line.get_color() for line in others}) == 2, "seeds of a combination share a colour"
    alone = result.plot("bytes_up", against="step", ax=axes)
    assert alone is axes
    np.testing.assert_array_equal(axes.get_lines()[-1].get_xydata(), result.history[["step", "bytes_up"]])


@pytest.mark.parametrize(
    ("draw", "kind", "sentence"),
    [
        (lambda one: one.plot("objektive"), ValueError, "no column 'objektive'; did you mean 'objective'?"),
        (lambda one: fb.plot(), TypeError, "plot needs a run"),
        (lambda one: fb.plot(one, labels=["a", "b"]), ValueError, "labels names 2 runs, but there are 1"),
        (lambda one: fb.plot(one.outer), TypeError, "plot takes results of simulate and sweep"),
        (lambda one: fb.simulate(algorithm, data, 1, record_every=None).plot(), ValueError, "recorded nothing"),
        (lambda one: fb.simulate(algorithm, data, 1, progress="yes"), TypeError, "progress must be True or a function"),
    ],
)
def test_what_cannot_be_drawn_is_said(result, draw, kind, sentence):
    with pytest.raises(kind, match=sentence.replace("?", r"\?")):
        draw(result)


def test_without_matplotlib_one_sentence(result, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"Figures need matplotlib: install it with .*fedbilevel\[report\]"):
        result.plot()


def test_a_bar_changes_no_number(result, swept, capsys):
    with_bar = fb.simulate(algorithm, data, 5, seed=3, diagnostics="cheap", progress=True)
    identical((with_bar.outer, with_bar.inner, with_bar.server), (result.outer, result.inner, result.server))
    assert capsys.readouterr().err == "fedbio: 5/5\n"
    again = fb.sweep(
        algorithm, data, 3, seeds=range(2), diagnostics="cheap", record_every=1, outer_step=[0.1, 0.3], progress=True
    )
    identical(again.outer, swept.outer)
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
