"""Secure sums against a coordinator that holds every wire: what it would need for one site's numbers, tried by hand."""

import json

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.quasi_newton import quasi_newton
from fedbilevel.engines.fixed import NARROW, WIDE
from fedbilevel.federation.protocol import privacy, site
from fedbilevel.federation.protocol.compiled import beginnings, items_of, local_data
from fedbilevel.federation.protocol.policy import Privacy
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.plan import Phase
from fedbilevel.tasks import quadratic
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
        numbered = enumerate(items_of(self.stage.algorithm.plan))
        self.items = {item.name: number for number, item in numbered if isinstance(item, Phase)}

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


def from_state(*label):
    """All sites go on from the state after this exchange."""
    return {name: list(label) for name in SITES}


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
    same = from_state(0, 0, 0, 1)
    assert wire.sum([direction], [0, 0, 1, 1], same, wire.items["curve"]) is None
    for name in SITES:
        wire.ask(name, [outer, inner], [0, 0, 0, 2], None, wire.items["slope"], "8.1")
    same = from_state(0, 0, 0, 2)
    assert wire.sum([direction], [0, 0, 1, 2], same, wire.items["curve"]) is not None


@pytest.mark.parametrize("task", ["work", "measure"])
def test_a_site_that_goes_on_from_another_state_than_the_others_has_no_sum(tmp_path, task):
    """Two sums that differ in one site's state alone would tell what its reply has changed by."""
    settings = settings_for("fedbio", rounds=4, secure=True, **OPTIONS)
    wire = Wire(tmp_path, settings, array_sites(tmp_path, settings))
    start = [np.zeros(programs.OUTER)]
    nothing, first = dict.fromkeys(SITES), from_state(0, 0, 0, 1)
    assert wire.sum(start, [0, 0, 0, 1], nothing, 0) is not None
    state = [np.asarray(leaf) for leaf in jax.tree.leaves(wire.stage.begin())] if task == "measure" else start
    assert wire.sum(state, [0, 1, 0, 1], first, 0, task=task) is not None
    assert wire.sum(state, [0, 1, 0, 1], {**first, "site-1": None}, 0, task=task) is None
    unknown = wire.ask("site-1", state, [0, 1, 0, 1], [0, 0, 0, 9], 0, wire.ticket(), task=task)
    assert unknown == {"refused": "lost"}, "it would go on from an earlier one"


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
    # A phase that recalls the last round, where a round can begin with it, is for those who were there.
    monkeypatch.setattr(site, "beginnings", lambda plan: ({slope, curve}, False))
    monkeypatch.setitem(wire.stage.__dict__, "items", [*wire.stage.items])
    wire.stage.items[curve] = wire.stage.items[curve]._replace(recalls=True)
    assert "arrays" in wire.ask("site-1", [direction], [0, 1, 0, 1], [0, 0, 0, 1], curve, "9.5")
    assert wire.ask("site-1", [direction], [0, 1, 0, 1], [0, 0, 0, 2], curve, "9.5") == {"refused": "sums"}
    assert wire.ask("site-1", [direction], [0, 2, 0, 1], [0, 0, 0, 1], curve, "9.6") == {"refused": "lost"}


def test_a_round_of_a_tuning_begins_with_a_point_or_recalls_one():
    start = (np.zeros(4), np.zeros((3, 5)))
    losses = (quadratic.inner_loss, quadratic.outer_loss)
    problem = fb.BilevelProblem(*losses, lambda key: start, lower_level="global")
    plan = quasi_newton(problem, 2, np.ones(4)).plan
    items = [*items_of(plan)]
    assert {items[number].name: items[number].recalls for number in beginnings(plan)[0]} == {
        "choices": False, "model": True, "bend": True, "look": False, "gap": True, "shift": True,
    }  # fmt: skip


def quadratic_wire(folder, name="fedavg", weights="uniform", sites=None, **policy):
    settings = settings_for(name, rounds=4, secure=True, weights=weights, **OPTIONS)
    return Wire(folder, settings, array_sites(folder, settings, **policy) if sites is None else sites(settings))


MODEL = [np.zeros(programs.INNER)]


def test_the_scale_of_a_sum_is_nothing_to_measure_one_site_by(tmp_path):
    """A refusal where a site has more rows than the scale would bracket their number, and what other scales round to would
    tell more of it."""
    wire = quadratic_wire(tmp_path, weights="samples")
    told = [wire.ask(name, MODEL, [0, 0, 0, 1], None, 0, "9.1", scale=4.0) for name in SITES]
    assert programs.SAMPLES > 4
    assert not any("refused" in each for each in told), "nobody is named"
    assert wire.ask("site-1", MODEL, [0, 0, 0, 1], None, 0, "9.2", scale=64.0) == {"refused": "agreed"}


def test_rows_are_in_no_sum_where_a_site_does_not_tell_them(tmp_path):
    wire = quadratic_wire(tmp_path, tell=())
    request = {"digest": wire.settings.digest, "stage": 0, "agreed": {}, "answers": []}
    more = {"ticket": "9.1", "present": "111", "exchange": "rows/0"}
    assert wire.sites["site-1"].answer("prepare", {**request, **more}) == {"refused": "tell rows"}
    assert wire.sites["site-1"].answer("prepare", request) == {}


NOISE = Privacy(clip=2e-6, noise=5e5, shared=True)


def test_shares_of_noise_are_for_one_sum(tmp_path):
    """Sent again in another sum, the others' shares would cancel in the difference, and leave one site's replies with its share
    alone."""
    pytest.importorskip("dp_accounting")
    wire = quadratic_wire(tmp_path, privacy=NOISE)
    told = [wire.ask("site-1", MODEL, [0, 0, 0, 1], None, 0, ticket) for ticket in ("9.1", "9.1", "9.2")]
    assert all("arrays" in each for each in told)
    assert json.loads((tmp_path / "site-1/privacy.json").read_text())["replies"] == 2
    np.testing.assert_array_equal(told[0]["arrays"][0], told[1]["arrays"][0])


@pytest.mark.parametrize(
    ("others", "spread"),
    [(NOISE, 3), (None, 1), (Privacy(2e-6, 5e5), 1), (Privacy(1e-6, 5e5, shared=True), 1)],
    ids=["as much", "none", "not shared", "less"],
)
def test_noise_is_shared_with_sites_that_have_as_much(tmp_path, monkeypatch, others, spread):
    """A share is a part of the noise that is accounted for only where the others add theirs, as they have signed."""
    pytest.importorskip("dp_accounting")
    monkeypatch.setattr(privacy, "normal", lambda shape: np.full(shape, 1.0))

    def sites(settings):
        return array_sites(tmp_path, settings, SITES[:1], privacy=NOISE) | array_sites(
            tmp_path, settings, SITES[1:], privacy=others
        )

    wire = quadratic_wire(tmp_path, sites=sites)
    wire.ask("site-1", MODEL, [0, 0, 0, 1], None, 0, "9.1")
    np.testing.assert_allclose(wire.sites["site-1"].door.guard.last[1][0], 1 / np.sqrt(spread), rtol=1e-5)


def known_draws(wire, rounds):
    """[round, row]: how much every row of every site counts in a sum at a model of zeros, as anybody can tell who knows the
    seed, and about how many rows there are."""
    rows = np.eye(programs.SAMPLES)[:, None, :, None] * np.ones(programs.INNER)  # each in turn is the only one
    counts = []
    for client in range(len(SITES)):
        (train, val), local = jax.tree.map(lambda leaf: leaf[0] * 0, wire.data), wire.stage.enroll()
        for offset in rows[:, 0]:
            data = local_data(train._replace(offset=offset), val, client)
            counts.append([wire.stage.work(MODEL[0], local, data, number, 0)[0][0][0] for number in range(rounds)])
    return np.array(counts).T


@pytest.mark.parametrize("secret", [False, True], ids=["known draws", "secret draws"])
def test_what_a_sum_tells_of_rows_by_the_draws_of_its_batches(tmp_path, secret):
    """At the same model every sum is a mean of other rows.  Whoever knows which has, after as many rounds as there are rows,
    those of every site, masks or not."""
    rounds = 4 * programs.CLIENTS * programs.SAMPLES
    settings = settings_for("fedavg", rounds=rounds, secure=True, local_steps=1, batch_size=4)
    wire = Wire(tmp_path, settings, array_sites(tmp_path, settings, secret_draws=secret))
    wire.data = jax.tree.map(np.asarray, (programs.client_data().train, programs.client_data().val))
    none = dict.fromkeys(SITES)
    sums = [wire.sum(MODEL, [0, number, 0, 1], none, 0) for number in range(rounds)]
    means = np.array([found[:-1] / found[-1] for found in sums]) * len(SITES)
    solved, *_ = np.linalg.lstsq(known_draws(wire, rounds), means, rcond=None)
    offsets = programs.client_data().train.offset.reshape(-1, programs.INNER)
    assert (np.abs(solved - offsets).max() < 1e-6) is not secret
    if secret:
        assert len({each.secret.tobytes() for each in wire.sites.values()}) == len(SITES)
