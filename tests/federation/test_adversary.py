"""Secure sums against a coordinator that holds every wire: what it would need for one site's numbers, tried by hand."""

import jax
import numpy as np
import pytest

from fedbilevel.engines.fixed import NARROW, WIDE
from fedbilevel.federation.protocol.compiled import items_of
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.plan import Phase
from tests.federation import programs
from tests.federation.direct import SITES, Direct, array_sites, coordinate, fair_array_sites, settings_for

pytestmark = pytest.mark.usefixtures("shared_compilation")
OPTIONS = {"batch_size": 4, "local_steps": 2}


class Wire:
    """Sites that have met and are prepared; from there on the coordinator asks what it likes, under tickets of its own."""

    def __init__(self, folder, settings, sites):
        self.settings, self.sites, self.tickets = settings, sites, 0
        self.first = None

        def stop(task, name, request):
            if task == "work":
                self.first = request
                raise KeyboardInterrupt
            return request

        with pytest.raises(KeyboardInterrupt):
            coordinate(folder, settings, Direct(sites, meddle=stop))
        self.stage = next(iter(sites.values())).compiled
        self.items = {
            item.name: number
            for number, item in enumerate(items_of(self.stage.algorithm.plan))
            if isinstance(item, Phase)
        }

    def ticket(self):
        self.tickets += 1
        return f"9.{self.tickets}"

    def ask(self, name, arrays, label, since, item, ticket, task="work", **more):
        exchange = "/".join(map(str, (task, *label[: 3 if task == "work" else 2])))
        request = {**self.first, "arrays": arrays, "label": label, "since": since, "item": item, "ticket": ticket}
        present = "1" * len(self.settings.sites)
        return self.sites[name].answer(task, {**request, "exchange": exchange, "present": present, **more})

    def sum(self, arrays, label, since, item, **more):
        """What comes out of the replies of all sites; ``since``: by site.  None where nothing does."""
        ticket = self.ticket()
        told = [self.ask(name, arrays, label, since[name], item, ticket, **more) for name in self.sites]
        return added([each["arrays"][0] for each in told]) if all("arrays" in each for each in told) else None


def added(parts):
    """A sum of masked numbers, without the word that counts the sites; None where the masks do not cancel."""
    ring = {NARROW.width: NARROW, WIDE.width: WIDE}[16 * parts[0].shape[1]]
    *values, count = ring.decode(sum(ring.unpack(part) for part in parts))
    return np.array(values) if count * 2.0**ring.bits == len(parts) else None


def path_wire(folder, sizes=(61, 67, 71), **policy):
    arguments = {"arrays": {"features": 6, "groups": 2}, "recipe": {"method": "fedpath"}, "minimum_cell": 1}
    settings = JobSettings("fair", "fair", SITES, arguments, secure=True)
    sites, rows = fair_array_sites(folder, settings, np.random.default_rng(0), sizes, 6, **policy)
    return Wire(folder, settings, sites), rows


def test_sites_that_remember_other_models_have_no_sum(tmp_path):
    """Sites keep the model that a phase sends for the phases after it.  At a model that is sure of every row the loss does not
    curve: with it at two sites, a product with the Hessian would be the third site's alone."""
    wire, _ = path_wire(tmp_path)
    outer, inner, direction = np.zeros(4, np.float32), np.zeros(6, np.float32), np.eye(6, dtype=np.float32)[0]
    for number, name in enumerate(SITES):
        model = inner + (100 if number else 0)
        assert "arrays" in wire.ask(name, [outer, model], [0, 0, 0, 1], None, wire.items["slope"], wire.ticket())
    same = dict.fromkeys(SITES, [0, 0, 0, 1])
    assert wire.sum([direction], [0, 0, 1, 1], same, wire.items["curve"]) is None
    for name in SITES:
        wire.ask(name, [outer, inner], [0, 0, 0, 2], None, wire.items["slope"], "8.1")
    same = dict.fromkeys(SITES, [0, 0, 0, 2])
    assert wire.sum([direction], [0, 0, 1, 2], same, wire.items["curve"]) is not None


@pytest.mark.parametrize("task", ["work", "measure"])
def test_a_site_that_goes_on_from_another_state_than_the_others_has_no_sum(tmp_path, task):
    """Two sums that differ in one site's state alone would tell what its reply has changed by."""
    settings = settings_for("fedbio", rounds=4, secure=True, **OPTIONS)
    wire = Wire(tmp_path, settings, array_sites(tmp_path, settings))
    start = [np.zeros(programs.OUTER)]
    nothing, first = dict.fromkeys(SITES), dict.fromkeys(SITES, [0, 0, 0, 1])
    assert wire.sum(start, [0, 0, 0, 1], nothing, 0) is not None
    state = [np.asarray(leaf) for leaf in jax.tree.leaves(wire.stage.begin())] if task == "measure" else start
    assert wire.sum(state, [0, 1, 0, 1], first, 0, task=task) is not None
    assert wire.sum(state, [0, 1, 0, 1], {**first, "site-1": None}, 0, task=task) is None
    assert wire.sum(state, [0, 1, 0, 1], {**first, "site-1": [0, 1, 0, 1]}, 0, task=task) is None, (
        "it has no such state"
    )


FIVE = tuple(f"site-{number}" for number in range(1, 6))


def test_a_round_of_many_sites_begins_as_the_plan_does(tmp_path, monkeypatch):
    """Of five, one may have been away, so earlier rounds do not bind; within a round, whose first phases send the model, the
    sites were all asked the same."""
    monkeypatch.setattr("tests.federation.direct.SITES", FIVE)
    arguments = {"arrays": {"features": 6, "groups": 2}, "recipe": {"method": "fedpath"}, "minimum_cell": 1}
    settings = JobSettings("fair", "fair", FIVE, arguments, secure=True)
    sites, _ = fair_array_sites(tmp_path, settings, np.random.default_rng(0), (61, 67, 71, 63, 65), 6)
    wire = Wire(tmp_path, settings, sites)
    outer, inner, direction = np.zeros(4, np.float32), np.zeros(6, np.float32), np.eye(6, dtype=np.float32)[0]
    slope, curve = wire.items["slope"], wire.items["curve"]
    told = wire.ask("site-1", [outer, inner], [0, 0, 0, 1], None, slope, "9.1")
    assert "arrays" in told
    assert wire.ask("site-1", [direction], [0, 1, 0, 1], [0, 0, 0, 1], curve, "9.2") == {"refused": "stage"}
    assert wire.ask("site-1", [direction], [0, 0, 99, 1], [0, 0, 0, 1], curve, "9.2") == {"refused": "often"}
    again = [wire.ask("site-1", [direction], [0, 0, 1, 1], [0, 0, 0, 1], curve, "9.3")["arrays"] for _ in range(2)]
    np.testing.assert_array_equal(*(each[0] for each in again))
    # The same under another history of the round, which a second model for the same exchange makes.
    wire.ask("site-1", [outer, inner + 1], [0, 0, 0, 2], None, slope, "9.4")
    assert wire.ask("site-1", [direction], [0, 0, 1, 2], [0, 0, 0, 2], curve, "9.3") == {"refused": "sums"}
