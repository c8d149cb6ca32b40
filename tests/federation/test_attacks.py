"""A coordinator against a site's policy, one attack a test: she holds a valid certificate and says what she likes.

The site has 300 patients; one of them, the only one older than 99, is whom the attacks are after.
"""

import dataclasses

import jax
import numpy as np
import pandas as pd
import pytest

from fedbilevel.engines.stages import REASONS, TELL, Refused
from fedbilevel.fairness.fedpath import Sent
from fedbilevel.federation.protocol.approval import approve, pending
from fedbilevel.federation.protocol.door import OFTEN, SPARE, effective_rows
from fedbilevel.federation.protocol.policy import Approval, Policy, Source
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.site import Site
from fedbilevel.plan import Phase
from fedbilevel.tables.schema import Column, Schema
from fedbilevel.tuning.problem import Choices
from tests.federation.direct import site as any_site

pytestmark = pytest.mark.usefixtures("shared_compilation")

ROWS, OLD = 300, 107
BOUNDS = {"minimum_rows": 20, "minimum_batch": 16, "minimum_cell": 5, "tell": TELL}
SCHEMA = Schema(
    "ill", ("no", "yes"), "yes", ("sex",), ("f", "m"), (Column("age", center=50.0), Column("pressure", center=120.0))
)


def patients():
    rng = np.random.default_rng(3)
    frame = pd.DataFrame({"age": rng.integers(20, 90, ROWS), "pressure": rng.normal(120, 15, ROWS).round(1)})
    frame["sex"], frame["ill"] = rng.choice(["f", "m"], ROWS), rng.choice(["no", "yes"], ROWS)
    frame["rare"] = np.where(np.arange(ROWS) == 7, 311.5, 0.0)
    frame["weight"] = np.where(np.arange(ROWS) == 7, np.nan, rng.normal(70, 10, ROWS).round())
    frame.loc[7, ["age", "pressure", "sex", "ill"]] = OLD, 187.3, "f", "yes"
    return frame


@pytest.fixture
def attacked(tmp_path):
    """Makes the site for a job; ``ask(task, ...)`` says what left it."""
    patients().to_csv(tmp_path / "rows.csv", index=False)
    source = Source(tmp_path / "rows.csv", columns=("age", "pressure", "sex", "ill", "rare", "weight"))

    def make(
        schema=SCHEMA, policy=None, validation=None, class_weight=None, tune=(), folds=3, run="run", seed=0, **recipe
    ):
        recipe = {"method": "fedavg", "steps": 4, "local_steps": 1, "batch_size": None, **recipe}
        fair = {"recipe": recipe, "validation": validation, "class_weight": class_weight}
        arguments = {"schema": schema.text(), **({"what": list(tune), "sites": 1, "folds": folds} if tune else fair)}
        settings = JobSettings(run, "tune" if tune else "fair", ("site-1",), arguments, seed, double=True)
        said = []
        made = any_site(tmp_path, "site-1", settings, source, said.append, **{**BOUNDS, **(policy or {})})
        ask = lambda task, **request: made.answer(task, {"digest": settings.digest, **request})  # noqa: E731
        return Attacked(made, settings, ask, said)

    return make


@dataclasses.dataclass
class Attacked:
    site: Site
    settings: JobSettings
    ask: object
    said: list

    def agreed(self, **forged):
        """What an honest coordinator would have agreed on with this site alone, but for what is forged."""
        program, agreed = self.site.program, {}
        for number in range(program.surveys):
            share = program.survey(number, self.site.policy.source, agreed, ())
            agreed |= program.agree(number, [share], agreed)
        return {**agreed, **{name.replace("__", "/"): value for name, value in forged.items()}}

    def prepare(self, agreed=None, answers=()):
        return self.ask("prepare", stage=len(answers), agreed=agreed or self.agreed(), answers=list(answers))

    def work(self, arrays, round_number=0, task="work", item=0):
        label = [self.site.number, round_number, 0, 1]
        return self.ask(task, label=label, since=None, floor=None, item=item, arrays=arrays)


def all_but(values, kept):
    return tuple(str(value) for value in sorted(set(values)) if value != kept)


def test_a_schema_that_selects_one_patient(attacked):
    """Every other age and pressure is said to mean missing: rows, count and sum would be hers."""
    rows = patients()
    one_class = dataclasses.replace(SCHEMA, missing=("", *all_but(rows["ill"], "yes"), "m"))
    assert "numbers" in attacked(one_class).ask("survey", survey=0, agreed={}), "half of the patients are many enough"
    one_age = dataclasses.replace(SCHEMA.columns[0], also_missing=all_but(rows["age"], OLD))
    columns = (one_age, SCHEMA.columns[1])
    for schema, policy in (
        (dataclasses.replace(SCHEMA, columns=columns), {}),
        (dataclasses.replace(one_class, columns=columns), {}),
        (one_class, {"minimum_rows": 250}),
    ):
        site = attacked(schema, policy)
        told = site.ask("survey", survey=0, agreed={})
        if "numbers" in told:  # the column is told as one that nobody has
            assert told["numbers"]["statistics/counts"][0] == told["numbers"]["statistics/sums"][0] == 0
        else:
            assert told == {"refused": "rows"}
    assert told == {"refused": "rows"}
    few = dataclasses.replace(SCHEMA.columns[0], also_missing=all_but(rows["age"], OLD)[12:])
    told = attacked(dataclasses.replace(SCHEMA, columns=(few, SCHEMA.columns[1]))).ask("survey", survey=0, agreed={})
    assert told in ({"refused": "cells"}, {"refused": "rows"}) or told["numbers"]["statistics/counts"][0] >= 20


def test_a_column_that_only_one_patient_has(attacked):
    """Sums over it are her value, and the gradient of its weight is her residual: neither leaves."""
    schema = dataclasses.replace(SCHEMA, columns=(*SCHEMA.columns, Column("rare")))
    site = attacked(schema)
    told = site.ask("survey", survey=0, agreed={})["numbers"]
    assert told["statistics/sums"][2] == told["statistics/squares"][2] == 0
    assert site.prepare() == {"rows": ROWS}
    width = len(schema.feature_names)
    assert not np.asarray(site.site.train["features"])[:, 2].any()
    reply = site.work([np.zeros(width, np.float32)])["arrays"][0]
    assert reply[2] == 0
    assert (np.delete(reply, 2) != 0).all()


def test_a_column_that_only_one_patient_lacks(attacked):
    """How many rows there are and how many have a value would say that it is one."""
    site = attacked(dataclasses.replace(SCHEMA, columns=(*SCHEMA.columns, Column("weight", center=70.0))))
    told = site.ask("survey", survey=0, agreed={})["numbers"]
    assert told["statistics/counts"].tolist() == [ROWS] * 3
    assert site.prepare() == {"rows": ROWS}


def test_forged_weights_of_cells_on_a_path(attacked):
    """FedPath's weights come with three of its phases, and stay for the others."""
    site = attacked(policy={"minimum_rows": 120}, method="fedpath", steps=None)
    assert site.prepare() == {"rows": ROWS}
    items = {phase.name: item for item, phase in enumerate(site.site.compiled.items) if isinstance(phase, Phase)}
    with_weights = [name for name, item in items.items() if isinstance(site.site.compiled.message_like(item), Sent)]
    assert with_weights == ["probe", "slope", "gap"]
    for number, name in enumerate(with_weights):
        like = jax.tree.leaves(site.site.compiled.message_like(items[name]))
        honest = [np.zeros(leaf.shape, leaf.dtype) for leaf in like]
        one_cell = np.array([0, 40, 0, 0], np.float32)
        assert site.work([one_cell, *honest[1:]], number, item=items[name]) == {"refused": "weights"}
        assert "arrays" in site.work(honest, number, item=items[name])


def test_forged_weights_of_cells(attacked):
    """All weight on one cell, by the answer of stage one or by a message of it: the reply would be that cell's."""
    recipe = {"method": "fedbio", "weight_steps": 4}
    honest, one_cell = np.zeros(4, np.float32), np.array([0, 40, 0, 0], np.float32)
    policy = {"minimum_rows": 120}  # no cell has as many
    site = attacked(policy=policy, **recipe)
    assert site.prepare() == {"rows": ROWS}
    assert site.work([one_cell]) == {"refused": "weights"}
    assert "arrays" in site.work([honest])
    assert site.prepare(answers=[[one_cell]]) == {"refused": "weights"}
    assert attacked(policy=policy, **recipe).prepare(answers=[[honest]]) == {"refused": "agreed"}, "answers are pinned"


@pytest.mark.parametrize(
    ("options", "minimum"),
    [
        ({"class_weight": "balanced"}, 200),
        ({"class_weight": "balanced", "method": "fedbio", "validation": 0.1}, 20),
        ({"tune": ["classes"]}, 200),
    ],
    ids=["training", "validation", "held out"],
)
def test_forged_weights_of_classes(attacked, options, minimum):
    """All weight on the ill, by counts of classes that nobody could deny: there are too few of them, or among those rows that
    the others are judged by."""
    site = attacked(policy={"minimum_rows": minimum}, **options)
    agreed = site.agreed()
    assert site.prepare({**agreed, "labels": agreed["labels"] * [1e9, 1]}) == {"refused": "weights"}
    assert "rows" in attacked(policy={"minimum_rows": minimum}, run="honest", **options).prepare(agreed)


def with_choices(site, **forged):
    """Every phase of a tuning whose message holds choices: its number, an honest message, and one with these in their place."""
    for item, phase in enumerate(site.site.compiled.items):
        if not isinstance(phase, Phase):
            continue
        honest = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), site.site.compiled.message_like(item))
        replaced = jax.tree.map(
            lambda part: part._replace(**forged) if isinstance(part, Choices) else part,
            honest,
            is_leaf=lambda part: isinstance(part, Choices),
        )
        if any(a is not b for a, b in zip(*map(jax.tree.leaves, (honest, replaced)), strict=True)):
            yield phase.name, item, jax.tree.leaves(honest), jax.tree.leaves(replaced)


def test_forged_choices_of_a_tuning(attacked):
    """All trust in one patient, by whichever message: the reply would be hers."""
    site = attacked(tune=["classes", "rows"])
    agreed = site.agreed()
    assert site.prepare(agreed) == {"rows": ROWS}
    age = site.site.program.reading.encoded(site.site.policy.source, agreed).model["features"][:, 0]
    second, first = np.sort(age)[-2:]
    trust = np.array([1, 0, -(first + second) / 2], np.float32) * 40 / (first - second)
    tried = list(with_choices(site, classes=np.array([-40, 0], np.float32), trust=trust))
    assert [name for name, *_ in tried] == ["choices", "look", "shift"]
    for number, (_, item, honest, forged) in enumerate(tried):
        assert site.work(forged, number, item=item) == {"refused": "weights"}
        assert "arrays" in site.work(honest, number, item=item)


def test_folds_of_single_patients(attacked):
    """Models that are trained without one fold each differ by that fold's rows."""
    assert attacked(tune=["penalties"], folds=ROWS).prepare() == {"refused": "cells"}
    assert attacked(tune=["penalties"], folds=ROWS // 5, run="few").prepare() == {"rows": ROWS}


def test_forged_choices_for_one_fold(attacked):
    """All trust in 40 patients: enough, but not in each of 20 folds."""
    site = attacked(tune=["classes", "rows"], folds=20)
    agreed = site.agreed()
    assert site.prepare(agreed) == {"rows": ROWS}
    rows = site.site.train
    age = np.sort(rows["features"][rows["labels"] == 1, 0])
    trust = np.array([1, 0, -(age[-41] + age[-40]) / 2], np.float32) * 400
    for number, (_, item, honest, forged) in enumerate(
        with_choices(site, classes=np.array([-40, 0], np.float32), trust=trust)
    ):
        assert site.work(forged, number, item=item) == {"refused": "weights"}
        assert "arrays" in site.work(honest, number, item=item)


def test_forged_momentum(attacked):
    """The momentum moves the weights within the round: it is looked at as well."""
    site = attacked(policy={"minimum_rows": 120}, method="fedbioacc", weight_steps=4, local_steps=5)
    assert site.prepare() == {"rows": ROWS}
    like = jax.tree.leaves(site.site.compiled.message_like(0))
    honest = [np.zeros(leaf.shape, leaf.dtype) for leaf in like]
    forged = [honest[0], np.array([0, -500, 0, 0], np.float32), honest[2]]
    assert site.work(forged) == {"refused": "weights"}
    assert "arrays" in site.work(honest)


@pytest.mark.parametrize("weights", [[1e6, 0.0], [-1.0, 1.0], [np.inf, 1.0]])
@pytest.mark.parametrize("method", ["fedminmax", "fedfb"])
def test_forged_weights_of_groups(attacked, method, weights):
    site = attacked(policy={"minimum_rows": 200}, method=method)
    assert site.prepare() == {"rows": ROWS}
    model = np.zeros(len(SCHEMA.feature_names), np.float32)
    kind = jax.tree.leaves(site.site.compiled.message_like(0))[1].dtype
    told = site.work([model, np.array(weights, kind)])
    assert told == {"refused": "request" if np.inf in weights else "weights"}
    assert "arrays" in site.work([model, np.ones(2, kind)])


@pytest.mark.parametrize(
    "forged",
    [
        {"statistics__sums": [-60.0, 0.0]},  # fewer than the site's own: a mean of its choice
        {"statistics__counts": [10.0, 10.0]},
        {
            "statistics__counts": [3e8, 3e8],
            "statistics__rows": [3e8],
            "statistics__squares": [3e6, 3e6],
        },  # tiny spreads
        {"statistics__squares": [1e9, 1e9], "statistics__sums": [1e12, 0.0]},
        {"rows": [1, ROWS, ROWS, ROWS], "smoothness": [1.0], "nonsense": [1.0]},
        {"rows": [ROWS + 1, ROWS + 1, ROWS, ROWS]},
    ],
    ids=["sums", "counts", "spread", "impossible", "names", "rows"],
)
def test_forged_scaling(attacked, forged):
    site = attacked()
    agreed = site.agreed(**{name: np.asarray(value) for name, value in forged.items()})
    assert site.prepare(agreed) == {"refused": "agreed"}


def test_a_doubtful_agreement_is_the_only_one(attacked):
    """One sum after the other, refused where it is below the site's own, would tell these exactly: in a run of many sites too,
    where only sums over sites are to be seen."""
    site = attacked()
    honest = site.agreed()
    low = {**honest, "statistics/squares": honest["statistics/squares"] * 0.99}
    assert site.ask("survey", survey=1, agreed=low) == {"refused": "agreed"}
    for agreed in (honest, {**honest, "statistics/squares": honest["statistics/squares"] * 1.01}):
        assert site.ask("survey", survey=1, agreed=agreed) == {"refused": "agreed"}
        assert site.prepare(agreed) == {"refused": "agreed"}
    junk = [site.ask("survey", survey=0, agreed={f"junk/{number}": np.zeros(10**6)}) for number in range(9)]
    assert junk[-1] == {"refused": "large"}, "what is settled takes no more room than a message"


def test_sums_with_known_signs(attacked):
    """FedPath's probes: everybody knows their signs, so 300 of them would tell 300 patients.  A site draws them once."""
    site = attacked(method="fedpath", steps=None)
    assert site.prepare() == {"rows": ROWS}
    (probe,) = (item for item, phase in enumerate(site.site.compiled.items) if getattr(phase, "name", "") == "probe")
    message = [np.zeros(like.shape, like.dtype) for like in jax.tree.leaves(site.site.compiled.message_like(probe))]
    assert "arrays" in site.work(message, 4, item=probe)
    assert "arrays" in site.work(message, 4, item=probe), "the same once more, as after a fault"
    assert site.work(message, 5, item=probe) == {"refused": "often"}
    few = attacked(policy={"minimum_rows": ROWS - 15}, method="fedpath", steps=None, run="few")
    assert few.prepare() == {"refused": "rows"}, "what 16 of them leave open is worth fewer rows"


def probed(site, number=4):
    """(what a site tells of its rows by FedPath's probes, what they are by the run's seed), at a model of zeros."""
    assert site.prepare() == {"rows": ROWS}
    made = site.site.compiled
    (probe,) = (item for item, phase in enumerate(made.items) if getattr(phase, "name", "") == "probe")
    message = [np.zeros(like.shape, like.dtype) for like in jax.tree.leaves(made.message_like(probe))]
    (told,) = site.work(message, number, item=probe)["arrays"]
    return told, made.work(Sent(*message), site.site.enrolled, site.site.data, number, 0, item=probe)[0]


def test_known_signs_of_many_runs(attacked):
    """Another seed is another run with other signs: twenty runs of 16 sums would tell 300 patients.  What all of them together
    leave open is worth as many rows as anything is told of."""
    policy = {"minimum_rows": ROWS - 40, "secret_draws": True}
    made = lambda seed, run: attacked(policy=policy, method="fedpath", steps=None, run=run, seed=seed)  # noqa: E731
    for seed in (1, 2):
        told, known = probed(made(seed, f"run-{seed}"))
        np.testing.assert_array_equal(told, known)
    third, known = probed(made(3, "run-3"))
    assert np.abs(third - known).max() > 0.1, "signs of the site's own"
    np.testing.assert_array_equal(probed(made(3, "run-3"))[0], third, "the same ones after a restart")
    told, known = probed(made(1, "again"))
    np.testing.assert_array_equal(told, known, "what is known already tells nothing more")
    assert np.abs(np.subtract(*probed(made(1, "later"), 5))).max() > 0.1, "another round has other signs"
    (told, known), policy["secret_draws"] = probed(made(4, "run-4")), False
    assert np.abs(told - known).max() > 0.1
    np.testing.assert_array_equal(*probed(made(4, "open")))


def test_what_was_agreed_on_cannot_change(attacked):
    site = attacked()
    assert site.prepare() == {"rows": ROWS}
    agreed = site.agreed()
    other = {**agreed, "smoothness": agreed["smoothness"] * 2}
    assert attacked().prepare(other) == {"refused": "agreed"}, "after a restart too"
    assert attacked(steps=5).prepare(other) == {"rows": ROWS}, "another run of the same name"
    assert attacked().prepare(other) == {"refused": "agreed"}, "which does not make this one be forgotten"
    assert site.prepare() == {"rows": ROWS}


@pytest.mark.parametrize(
    ("recipe", "validation", "reason"),
    [
        ({"batch_size": 1}, None, "batch"),
        ({"method": "fedbio", "outer_batch_size": 1}, None, "batch"),
        ({"method": "fedbio"}, 0.01, "rows"),
        ({"step": 1e6}, None, "bounds"),
        ({"steps": 2001}, None, "bounds"),
    ],
    ids=["batch", "outer batch", "validation", "step", "rounds"],
)
def test_batches_steps_and_rounds(attacked, recipe, validation, reason):
    auto = Approval(auto=True, schemas=(SCHEMA.digest,))
    assert attacked(validation=validation, policy={"approval": auto}, **recipe).prepare() == {"refused": reason}


def test_replies_beyond_the_rounds(attacked):
    """Any number of replies at points of her choice would show the whole loss; a run has what its rounds need, and some."""
    site = attacked(steps=1)
    site.prepare()
    width = len(SCHEMA.feature_names)
    told = [site.work([np.full(width, value, np.float32)]) for value in range(OFTEN + SPARE + 1)]
    assert [("arrays" in one) for one in told] == [True] * (OFTEN + SPARE) + [False]
    assert told[-1] == site.work([np.zeros(width, np.float32)], 1) == {"refused": "often"}
    again = attacked(steps=1)
    again.prepare()
    assert again.work([np.zeros(width, np.float32)]) == {"refused": "often"}, "after a restart too"


def test_large_messages(attacked):
    values = tuple(f"v{number}" for number in range(30))
    wide = dataclasses.replace(SCHEMA, columns=(SCHEMA.columns[0], Column("pressure", "category", values)))
    site = attacked(wide, policy={"largest_megabytes": 1e-4})
    assert site.prepare() == {"rows": ROWS}
    assert site.work([np.zeros(len(wide.feature_names), np.float32)]) == {"refused": "large"}
    assert attacked(policy={"largest_megabytes": 1e-5}).ask("survey", survey=0, agreed={}) == {"refused": "large"}
    honest = attacked()
    assert honest.prepare(honest.agreed(smoothness=np.zeros(9_000_000))) == {"refused": "large"}, "nor is it kept"


@pytest.mark.parametrize("secret", ["{$HOME}", "a\nforged line", "x" * 10**6])
def test_no_word_of_a_job_comes_back(attacked, tmp_path, secret):
    """What a site refuses it refuses in its own words, whatever the job or the table said."""
    schema = dataclasses.replace(SCHEMA, columns=(Column(f"{secret[:500]}age"),))
    told = attacked(schema).ask("survey", survey=0, agreed={})
    assert told == {"refused": "columns"}
    with pytest.raises(Refused) as caught:
        any_site(tmp_path, "site-1", JobSettings("run", f"lab:{secret}", ("site-1",)), Source())
    assert caught.value.reason == "program"
    assert all("{" not in sentence and len(sentence) < 130 for sentence in REASONS.values())


def test_a_run_waits_until_somebody_approves_it(attacked, tmp_path):
    by_hand = {"approval": Approval()}
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            attacked(policy=by_hand)
        assert caught.value.reason == "approval"
    folder = tmp_path / "site-1"
    (waiting,) = pending(folder).values()
    approve(waiting, folder, "person")
    assert pending(folder) == {}
    assert attacked(policy=by_hand, steps=4).prepare() == {"rows": ROWS}
    with pytest.raises(Refused):
        attacked(policy=by_hand, steps=5)  # approved was the run, not its name


@pytest.mark.parametrize(
    ("bounds", "allowed"),
    [
        ({"schemas": (SCHEMA.digest,)}, True),
        ({"schemas": ("any",), "methods": ("fedavg",)}, True),
        ({}, False),
        ({"schemas": ("0" * 64,)}, False),
        ({"schemas": ("any",), "methods": ("fedbioacc",)}, False),
    ],
)
def test_what_is_approved_by_itself(attacked, bounds, allowed):
    policy = {"approval": Approval(auto=True, runs=1, **bounds)}
    if not allowed:
        with pytest.raises(Refused, match="waits for the approval"):
            attacked(policy=policy)
        return
    attacked(policy=policy)
    attacked(policy=policy)  # the same run, started again
    with pytest.raises(Refused, match="waits for the approval"):
        attacked(policy={"approval": Approval()})  # after the site has changed its mind
    with pytest.raises(Refused, match="waits for the approval"):
        attacked(policy=policy, steps=5)  # a second run


@pytest.mark.parametrize(("methods", "allowed"), [((), True), (("fedavg",), False), (("fedavg", "tune"), True)])
def test_a_list_of_methods_is_about_tunings_and_audits_too(attacked, methods, allowed):
    policy = {"approval": Approval(auto=True, schemas=("any",), methods=methods)}
    if allowed:
        attacked(policy=policy, tune=["rows"])
        return
    with pytest.raises(Refused, match="waits for the approval"):
        attacked(policy=policy, tune=["rows"])


def test_a_schema_is_known_by_what_it_says():
    noted = dataclasses.replace(SCHEMA.columns[0], note="a guess")
    same = dataclasses.replace(SCHEMA, site="ward", columns=(noted, SCHEMA.columns[1]))
    assert same.digest == SCHEMA.digest == Schema.parse(SCHEMA.text()).digest
    other = dataclasses.replace(SCHEMA.columns[0], also_missing=("33",))
    for changed in ({"columns": (other, SCHEMA.columns[1])}, {"missing": ("", "33")}, {"groups": ("f",)}):
        assert dataclasses.replace(SCHEMA, **changed).digest != SCHEMA.digest


def test_effective_rows():
    assert effective_rows(np.full(9, 0.3)) == pytest.approx(9)
    assert effective_rows(np.array([1.0] + [1e-9] * 99)) == pytest.approx(1, rel=1e-6)
    assert effective_rows(np.array([1.0, -1.0, 1.0])) == 0
    assert effective_rows(np.array([np.nan, 1.0])) == 0


def test_a_policy_without_bounds_is_strict():
    assert (Policy().minimum_rows, Policy().minimum_batch, Policy().minimum_cell, Policy().approval.auto) == (
        20,
        16,
        10,
        False,
    )
    assert Policy().secret_draws
