"""Runs with secure sums, sites in this process: the simulation's numbers, sites lost on the way, every trick refused."""

import copy
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel.engines.fixed import WIDE
from fedbilevel.engines.rounds import PARTICIPATION
from fedbilevel.federation.protocol import privacy, secure, site
from fedbilevel.federation.protocol.door import OFTEN, SPARE
from fedbilevel.federation.protocol.identity import PEERS
from fedbilevel.federation.protocol.policy import TELL, Privacy
from fedbilevel.federation.protocol.program import make_program
from fedbilevel.federation.protocol.record import Progress
from fedbilevel.federation.protocol.settings import JobSettings, RunFailed, TooFewSites, quorum
from fedbilevel.federation.protocol.sums import ANSWERED, MASTER
from fedbilevel.plan import client_key
from tests.federation import direct, programs
from tests.federation.direct import SITES, Direct, array_sites, coordinate, fair_array_sites, settings_for, written_out
from tests.federation.test_secure import uniform

pytestmark = pytest.mark.usefixtures("shared_compilation")
FIVE = tuple(f"site-{number}" for number in range(1, 6))
OPTIONS = {"batch_size": 4, "local_steps": 2}


def submit(folder, settings, fault=None, meddle=None, **policy):
    channel = Direct(array_sites(folder, settings, settings.sites, **policy), fault, meddle)
    return coordinate(folder, settings, channel)[0], channel


def tasks(channel, *names):
    return [task for task, *_ in channel.seen if task in names]


@pytest.fixture
def five(monkeypatch):
    monkeypatch.setattr(programs, "CLIENTS", 5)
    return settings_for("fedbio", rounds=3, min_sites=4, sites=FIVE, secure=True, **OPTIONS)


def among(monkeypatch, count):
    """The sites of a run: of three every one is needed for a sum, of five one may be lost."""
    monkeypatch.setattr(programs, "CLIENTS", count)
    return FIVE[:count]


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("name", "count"), [("fedavg", 3), ("fedbio", 5), ("fedbioacc", 3)])
def test_the_numbers_of_the_simulation_bit_for_bit(tmp_path, monkeypatch, name, count, weights):
    sites = among(monkeypatch, count)
    settings = settings_for(name, rounds=5, record_every=2, weights=weights, secure=True, sites=sites, **OPTIONS)
    found, channel = submit(tmp_path, settings)
    options = {"rounds": 5, "seed": 5, "weights": weights, "diagnostics": "cheap"}
    data, made = programs.client_data(), programs.algorithm(name, **OPTIONS)
    wanted = fb.simulate(made, data, secure=True, **options)
    np.testing.assert_array_equal(found, wanted.outer)
    np.testing.assert_allclose(found, fb.simulate(made, data, **options).outer, atol=1e-8)
    measured = pd.read_csv(tmp_path / "runs/run/history.csv").set_index("round")["objective"]
    expected = wanted.history.set_index("round").loc[measured.index, "objective"]
    np.testing.assert_allclose(measured, expected, rtol=1e-8)
    assert len(tasks(channel, "hello", "meet")) == 2 * count, "the sites meet once"
    sums = len(tasks(channel, "work", "measure")) + count * (weights == "samples")
    assert len(tasks(channel, "unmask")) == (sums if count > 3 else 0)
    assert not any({"objective", "rows"} & told.keys() for _, _, told in channel.seen)


@pytest.mark.parametrize("lost", [(), ((1, 4), (2, 0))])
def test_single_precision_travels_in_48_bits(tmp_path, monkeypatch, lost):
    """...and rounds as the simulation does, also without the sites that were lost."""
    sites = among(monkeypatch, 5)
    settings = settings_for("fedbio", 3, min_sites=4, sites=sites, secure=True, double=False, **OPTIONS)

    def fault(task, name, request, answer):
        gone = task == "work" and (request["label"][1], settings.client(name)) in lost
        return None if gone else answer

    found, channel = submit(tmp_path, settings, fault)
    made, data = programs.algorithm("fedbio", False, **OPTIONS), programs.client_data(False)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, written_out(made, data, 3, 5, lost, secure=True))
    np.testing.assert_allclose(found, written_out(made, data, 3, 5, lost), atol=1e-6)
    for task, _, told in channel.seen:
        if task == "work":
            assert told["arrays"][0].nbytes == 6 * (programs.OUTER + 2)


def faults(*lost):
    """A fault for every (task, site, round) in which a site's answer does not come."""

    def fault(task, name, request, answer):
        fault.round = request.get("label", [0, fault.round])[1]
        return None if (task, name, fault.round) in lost else answer

    fault.round = 0
    return fault


def test_a_site_lost_before_or_after_it_masked(tmp_path, five):
    """Site 5 sends no masked numbers in round 1, which costs one more message of every other site; site 2 sends them in round
    2, and then does not help to unmask, which costs nothing."""
    found, channel = submit(tmp_path, five, faults(("work", "site-5", 1), ("unmask", "site-2", 2)))
    made, data = programs.algorithm("fedbio", **OPTIONS), programs.client_data()
    np.testing.assert_array_equal(found, written_out(made, data, 3, 5, {(1, 4)}, secure=True))
    assert [name for task, name, _ in channel.seen if task == "repair"] == list(FIVE[:4])
    assert len(tasks(channel, "meet")) == 2 * 5, "once at the beginning, and once when site 5 had missed a sum"
    rows = pd.read_csv(tmp_path / "runs/run/exchanges.csv").set_index(["round", "site"])
    letters, shares, roll, words = 2 * 16, 16, 5, 8 * (programs.OUTER + 2)
    first, second = rows.loc[0, "site-1"], rows.loc[1, "site-1"]
    assert first["bytes_up"] == words + letters + 5 * shares
    assert second["bytes_up"] == 2 * words + letters + 4 * shares
    assert first["bytes_down"] == 8 * programs.OUTER + 2 * roll + 16
    assert rows.loc[1, "site-5"]["bytes_up"] == 0


def test_sites_lost_one_after_the_other_in_one_sum(tmp_path, monkeypatch):
    """Of nine, site 9 before it masks, site 8 before it repairs, site 7 before it repairs again: each in the same round.  The
    two do not count, and go on from where that round began."""
    monkeypatch.setattr(programs, "CLIENTS", 9)
    sites = tuple(f"site-{number}" for number in range(1, 10))
    settings = settings_for("fedbioacc", rounds=4, min_sites=6, sites=sites, secure=True, **OPTIONS)

    def fault(task, name, request, answer):
        fault.round = request.get("label", [0, fault.round])[1]
        alive = request.get("survivors", "").count("1")
        lost = {("work", "site-9", 0), ("repair", "site-8", 8), ("repair", "site-7", 7)}
        return None if fault.round == 1 and (task, name, alive) in lost else answer

    fault.round = 0
    found, channel = submit(tmp_path, settings, fault)
    made, data = programs.algorithm("fedbioacc", **OPTIONS), programs.client_data()
    np.testing.assert_array_equal(found, written_out(made, data, 4, 5, {(1, 6), (1, 7), (1, 8)}, secure=True))
    assert len(tasks(channel, "repair")) == 7 + 6 + 6
    outcomes = pd.read_csv(tmp_path / "runs/run/exchanges.csv").query("round == 1")["outcome"].tolist()
    assert outcomes == [*["answered"] * 6, *["lost before the sum"] * 2, "no answer"]
    assert "goes on without" not in (tmp_path / "runs/run/log.txt").read_text()


def test_a_site_lost_in_a_repair_that_leaves_too_few_for_the_run(tmp_path, monkeypatch):
    """A sum of three would do, but the run wants four: nothing is unmasked, and the round can be done again by others."""
    settings = settings_for("fedbio", rounds=2, min_sites=4, sites=among(monkeypatch, 5), secure=True, **OPTIONS)
    lost = faults(("work", "site-5", 1), ("repair", "site-4", 1))
    channel = Direct(array_sites(tmp_path, settings, settings.sites), lost)
    with pytest.raises(TooFewSites, match="Only 3 of the 4 sites that a secure sum needs"):
        coordinate(tmp_path, settings, channel)
    assert len(tasks(channel, "unmask")) == 5
    found, _ = submit(tmp_path, settings, faults(("work", "site-1", 1)))
    made, data = programs.algorithm("fedbio", **OPTIONS), programs.client_data()
    np.testing.assert_array_equal(found, written_out(made, data, 2, 5, {(1, 0)}, secure=True))


def test_the_simulation_with_dropouts_at_the_same_rounds_also_after_a_kill(tmp_path, monkeypatch):
    """Of nine sites those are lost whom `simulate` draws; the coordinator dies while they repair a sum, and goes on."""
    monkeypatch.setattr(programs, "CLIENTS", 9)
    sites = tuple(f"site-{number}" for number in range(1, 10))
    settings = settings_for("fedbioacc", rounds=4, min_sites=6, sites=sites, secure=True, **OPTIONS)
    made, data = programs.algorithm("fedbioacc", **OPTIONS), programs.client_data()
    wanted = fb.simulate(made, data, 4, seed=5, dropout=0.2, secure=True, record_every=None).outer
    drops = [jax.random.split(client_key(jax.random.key(5), number, 0, PARTICIPATION))[1] for number in range(4)]
    drawn = [
        [jax.random.uniform(jax.random.fold_in(key, c), dtype=jnp.float32) < 0.2 for c in range(9)] for key in drops
    ]
    lost = [("work", sites[client], number) for number, client in np.argwhere(drawn)]
    rounds = {int(number) for *_, number in lost}
    assert len(rounds) > 1, "several rounds lose sites"
    lose = faults(*lost)

    def die(task, name, request, answer):
        if task == "repair" and lose.round == max(rounds):
            raise KeyboardInterrupt
        return lose(task, name, request, answer)

    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path, settings, die)
    lose.round = 0
    found, channel = submit(tmp_path, settings, lose)
    np.testing.assert_array_equal(found, wanted)
    assert tasks(channel, "repair")


@pytest.mark.parametrize(
    "place",
    [
        ("hello", 2),
        ("meet", 1),
        ("prepare", 2),
        ("work", 4),
        ("unmask", 0),
        ("unmask", 6),
        ("unmask", 12),
        ("repair", 0),
        ("repair", 3),
        ("measure", 1),
    ],
)
def test_killed_anywhere_and_submitted_again(tmp_path, monkeypatch, place):
    """The numbers are those of a run without a kill, also where site 5 is lost in round 1 whenever that is done; and no
    exchange is told for two lists of sites."""
    sites = among(monkeypatch, 5 if place[0] in ("unmask", "repair") else 3)
    settings = settings_for(
        "fedbioacc",
        rounds=4,
        record_every=3,
        weights="samples",
        secure=True,
        sites=sites,
        min_sites=min(4, len(sites)),
        **OPTIONS,
    )
    seen, lost = [], {(1, 4)} if len(sites) == 5 else set()
    lose = faults(*(("work", f"site-{client + 1}", number) for number, client in lost))

    def die(task, name, request, answer):
        seen.append(task)
        answer = lose(task, name, request, answer)
        if seen.count(task) > place[1] and task == place[0]:
            raise KeyboardInterrupt
        return answer

    with pytest.raises(KeyboardInterrupt):
        submit(tmp_path, settings, die)
    found, _ = submit(tmp_path, settings, lose)
    made, data = programs.algorithm("fedbioacc", **OPTIONS), programs.client_data()
    np.testing.assert_array_equal(found, written_out(made, data, 4, 5, lost, secure=True, weight=programs.SAMPLES))


@pytest.mark.parametrize(("task", "count"), [("work", 3), ("work", 5), ("unmask", 5)])
def test_fewer_survivors_end_the_round_and_unmask_nothing(tmp_path, monkeypatch, task, count):
    settings = settings_for("fedbio", rounds=2, min_sites=2, secure=True, sites=among(monkeypatch, count), **OPTIONS)
    assert settings.needed == quorum(count) >= 3, "two of three would tell each what the other sent"
    kept = settings.sites[: settings.needed - 1]

    def lose(what, name, request, answer):
        return None if what == task and name not in kept else answer

    channel = Direct(array_sites(tmp_path, settings, settings.sites), lose)
    with pytest.raises(TooFewSites, match=f"Only {len(kept)} of the {settings.needed} sites"):
        coordinate(tmp_path, settings, channel)
    assert len(tasks(channel, "unmask")) == (0 if task == "work" else len(kept))
    assert np.isfinite(submit(tmp_path, settings)[0]).all(), "all are back"


# A coordinator that plays tricks: what the sites are asked is changed on its way to them.


def plays_another_site(task, name, request):
    """With a certificate in that site's name which its own authority issued."""
    if task == "meet" and name == "site-1":
        forged = direct.startup("site-2", "forger")
        request["hellos"][1] |= {"certificate": (forged / "client.crt").read_bytes()}
    return request


def swaps_a_key(task, name, request):
    if task == "meet" and name == "site-1":
        request["hellos"][1]["key"] = request["hellos"][2]["key"]
    return request


def leaves_two(task, name, request):
    return {**request, "present": "11000"[: len(request["present"])]} if task == "work" else request


def all_but_one_are_gone(task, name, request):
    return {**request, "survivors": "10000"} if task == "unmask" else request


def says_one_is_gone_without_repair(task, name, request):
    return {**request, "survivors": "11110"} if task == "unmask" else request


def names_a_stranger(task, name, request):
    return {**request, "survivors": request["survivors"] + "1"} if task == "unmask" else request


def counts_a_site_twice(task, name, request):
    return {**request, "survivors": "21111"} if task == "unmask" else request


def replays_a_ticket(task, name, request):
    if task == "work" and request["label"][1] == 1:
        request["ticket"] = "1.0"
    return request


def renames_the_exchange(task, name, request):
    return {**request, "exchange": "work/0/7/0"} if task == "work" else request


def unmasks_what_needs_all(task, name, request):
    """As if one of three could be lost."""
    return {**request, "present": "110"} if task == "work" else request


EVERYWHERE = [plays_another_site, swaps_a_key, replays_a_ticket, renames_the_exchange, leaves_two]
TRICKS = [
    *((trick, count) for trick in EVERYWHERE for count in (3, 5)), (all_but_one_are_gone, 5),
    (says_one_is_gone_without_repair, 5), (names_a_stranger, 5), (counts_a_site_twice, 5), (unmasks_what_needs_all, 3),
]  # fmt: skip


@pytest.mark.parametrize(("trick", "count"), TRICKS, ids=lambda value: getattr(value, "__name__", value))
def test_a_coordinator_that_plays_tricks_is_refused(tmp_path, monkeypatch, trick, count):
    settings = settings_for("fedbio", rounds=3, secure=True, sites=among(monkeypatch, count), **OPTIONS)
    with pytest.raises((TooFewSites, RunFailed), match="secure sum"):
        submit(tmp_path, settings, meddle=trick)


def another_model_for_the_others(task, name, request):
    """Whose replies it could guess, and take from the sum."""
    if task == "work" and name != "site-1":
        request["arrays"] = [np.zeros_like(array) for array in request["arrays"]]
        request["arrays"][0] += 1
    return request


def another_scale_for_the_others(task, name, request):
    return {**request, "scale": 2.0**40} if task == "work" and name != "site-1" else request


@pytest.mark.parametrize("trick", [another_model_for_the_others, another_scale_for_the_others])
def test_sites_that_were_asked_differently_have_no_sum(tmp_path, trick):
    with pytest.raises(RunFailed, match="did not cancel"):
        submit(tmp_path, settings_for("fedbio", rounds=2, weights="samples", secure=True, **OPTIONS), meddle=trick)


def fair_run(folder, meddle=None, secure=True, ask=None, threshold="auto", **policy):
    """FedAvg on arrays, which agrees on something before and after, and reports."""
    recipe = {"method": "fedavg", "steps": 4, "local_steps": 2, "batch_size": 16}
    arguments = {"arrays": {"features": 6, "groups": 2}, "recipe": recipe, "minimum_cell": 1, "threshold": threshold}
    settings = JobSettings("fair", "fair", SITES, arguments, secure=secure)
    policy = {"tell": TELL, **policy}
    sites, _ = fair_array_sites(folder, settings, np.random.default_rng(0), (61, 67, 71), 6, **policy)
    channel = Direct(sites, meddle=meddle and functools.partial(meddle, sites=sites))
    return settings, channel, coordinate(folder, settings, channel) if ask is None else ask(settings, sites)


def another_agreement_for_the_others(task, name, request, sites):
    if task == "prepare" and name != "site-1":
        request["agreed"]["smoothness"] = request["agreed"]["smoothness"] * 2
    return request


def and_then_nothing_was_agreed(task, name, request, sites):
    """...as if that were what the next reply depends on."""
    if task == "work":
        sites[name].answer("survey", {"digest": request["digest"], "survey": 0, "agreed": {}, "answers": []})
    return another_agreement_for_the_others(task, name, request, sites)


def another_answer_for_the_others(*tasks):
    """A model that accepts nobody: what the sum says of decisions would be of site 1 alone."""

    def meddle(task, name, request, sites):
        if task in tasks and name != "site-1" and request["answers"]:
            request["answers"] = [[np.zeros_like(array) for array in answer] for answer in request["answers"]]
        return request

    return meddle


@pytest.mark.parametrize(
    ("trick", "threshold"),
    [
        (another_agreement_for_the_others, None),
        (and_then_nothing_was_agreed, None),
        (another_answer_for_the_others("survey"), "auto"),
        (another_answer_for_the_others("finish"), None),
    ],
    ids=["agreed", "agreed and forgotten", "survey", "finish"],
)
def test_sites_that_were_told_of_other_agreements_or_answers_have_no_sum(tmp_path, trick, threshold):
    with pytest.raises(RunFailed, match="did not cancel"):
        fair_run(tmp_path, trick, threshold=threshold)


def test_a_report_leaves_in_a_sum_or_not_at_all(tmp_path):
    """A run without secure sums is refused where a site wants them, and so is a request that skips its training."""

    def finish(settings, sites):
        program = make_program(settings.program, settings.arguments, ())
        agreed = {}
        for number in range(program.surveys):
            told = [program.survey(number, each.policy.source, agreed, ()) for each in sites.values()]
            agreed |= program.agree(number, told, agreed)
        agreed["threshold"] = np.array([0.5])
        answers = [[np.ones(6, np.float32)]]
        asked = {"digest": settings.digest, "agreed": agreed, "answers": answers}
        return [each.answer("finish", asked) for each in sites.values()]

    (tmp_path / "open").mkdir()
    *_, told = fair_run(tmp_path, secure=False, ask=finish, secure_sums="from-three")
    assert told == [{"refused": "secure"}] * 3
    *_, told = fair_run(tmp_path / "open", secure=False, ask=finish)
    assert all("decisions" in each["numbers"] for each in told), "the policy leaves it to whoever submits"


@pytest.mark.parametrize(("count", "telling"), [(3, 1), (3, 2), (5, 3), (5, 4)])
def test_an_objective_is_of_those_who_tell_it_and_of_enough_of_them(tmp_path, monkeypatch, count, telling):
    """Zeros of the others would make a sum of one its own number, and with shared noise leave it less than its share."""
    names = among(monkeypatch, count)
    settings = settings_for("fedbio", rounds=3, record_every=1, secure=True, sites=names, **OPTIONS)
    sites = array_sites(tmp_path, settings, names[:telling]) | array_sites(tmp_path, settings, names[telling:], tell=())
    channel = Direct(sites)
    coordinate(tmp_path, settings, channel)
    history = pd.read_csv(tmp_path / "runs/run/history.csv")
    enough = telling >= quorum(count)
    assert history["sites"].tolist() == [telling if enough else 0] * 3
    assert history["objective"].notna().tolist() == [enough] * 3
    asked = [len(requests) for task, requests, _ in channel.waits if task == "measure"]
    assert asked == ([count, telling, telling] if enough else [count]), "those who tell nothing are asked once"


def test_a_report_is_of_enough_sites(tmp_path):
    def alone(settings, sites):
        for name in SITES[1:]:
            policy = sites[name].policy
            sites[name].policy = dataclasses.replace(policy, tell=tuple(set(policy.tell) - {"report"}))
        channel = Direct(sites)
        coordinate(tmp_path, settings, channel)
        return [told for task, _, told in channel.seen if task == "finish"]

    *_, told = fair_run(tmp_path, ask=alone)
    assert json.loads((tmp_path / "runs/fair/report.json").read_text()) == {}
    assert [sorted(each) for each in told[:3]] == [["arrays", "numbers"], ["numbers"], ["numbers"]]
    assert not any(each["numbers"] for each in told)
    assert "refused" not in (tmp_path / "runs/fair/log.txt").read_text()


def test_a_site_that_forgot_what_it_answered_has_another_key(tmp_path):
    settings = settings_for("fedbio", rounds=1, secure=True, **OPTIONS)
    keys = []
    for lost in (None, ANSWERED, MASTER):
        if lost is not None:
            (tmp_path / "site-1/run" / lost).unlink()
        for _ in range(2):
            one = array_sites(tmp_path, settings)["site-1"]
            keys.append(one.answer("hello", {"digest": settings.digest})["hello"]["key"])
    assert keys[0::2] == keys[1::2]
    assert len(set(keys)) == 3


def test_two_workers_of_a_site_keep_one_count(tmp_path):
    """...which a coordinator that submits a run twice would have at the same time."""
    settings = settings_for("fedavg", rounds=1, batch_size=4, local_steps=1, sites=("site-1",))
    first, second = (array_sites(tmp_path, settings, ("site-1",))["site-1"] for _ in range(2))
    asked = {"digest": settings.digest, "label": [0, 0, 0, 1], "since": None, "floor": None, "item": 0}
    asked["arrays"] = [np.zeros(programs.INNER)]
    for worker in (first, second):
        assert "refused" not in worker.answer("prepare", {**asked, "stage": 0, "agreed": {}, "answers": []})
    told = [worker.answer("work", asked) for _ in range((OFTEN + SPARE) // 2) for worker in (first, second)]
    assert sum("arrays" in each for each in told) == len(told) == OFTEN + SPARE - 1
    assert "arrays" in first.answer("work", asked)
    assert second.answer("work", asked) == {"refused": "often"}


def another_list_for_the_others(task, name, request):
    """Of those who take part, each list long enough by itself."""
    if task == "work" and name != "site-5":
        request["present"] = "11110"
    return request


def another_letter(task, name, request):
    if task == "unmask" and name == "site-1":
        request["letters"] = request["letters"] ^ np.uint8(1)
    return request


@pytest.mark.parametrize(
    ("trick", "sentence"), [(another_list_for_the_others, "refuses its part"), (another_letter, "do not make the seed")]
)
def test_sites_that_were_told_of_others_have_no_sum(tmp_path, five, trick, sentence):
    with pytest.raises(RunFailed, match=sentence):
        submit(tmp_path, five, meddle=trick)


def test_repairs_for_different_lists_do_not_add_up(tmp_path, monkeypatch):
    """Of seven sites one is lost, and one site is told of another one as well: its part of the repair is no part of the sum."""
    monkeypatch.setattr(programs, "CLIENTS", 7)
    sites = tuple(f"site-{number}" for number in range(1, 8))
    settings = settings_for("fedbio", rounds=1, min_sites=5, sites=sites, secure=True, **OPTIONS)

    def meddle(task, name, request):
        return {**request, "survivors": "1111100"} if (task, name) == ("repair", "site-1") else request

    def fault(task, name, request, answer):
        return None if (task, name) == ("work", "site-7") else answer

    # Site 1 will not unmask for another list than the one it repaired for; the five others are enough to see the seeds.
    with pytest.raises(RunFailed, match="did not cancel"):
        submit(tmp_path, settings, fault, meddle)


def test_two_lists_of_survivors_and_both_kinds_of_help(tmp_path, five):
    """Asked for a share of site 5's seed, and then for what its masks left, a site gives the first only; and the other way
    round where site 5 was lost."""
    asked = []

    def ask_twice(task, name, request, answer):
        number = ask_twice.round = request.get("label", [0, ask_twice.round])[1]
        if (task, name, number) == ("work", "site-5", 1):
            return None
        if task == "unmask" and name == "site-1":
            without = number == 1
            other, survivors = ("unmask", "11111") if without else ("repair", "11110")
            request = {"letters": request["letters"], "ticket": request["ticket"], "survivors": survivors}
            asked.append((answer, channel.all[name].answer(other, {**request, "digest": five.digest})))
        return answer

    ask_twice.round = 0
    channel = Direct(array_sites(tmp_path, five, FIVE), ask_twice)
    coordinate(tmp_path, five, channel)
    assert [len(first["arrays"][0]) for first, _ in asked] == [5, 4, 5]
    assert [second for _, second in asked] == [{"refused": "sums"}] * 3


def test_a_key_that_is_not_the_one_a_site_is_known_by(tmp_path, monkeypatch):
    """Whoever holds the authority can make a certificate in any name: the sites remember the first."""
    submit(tmp_path, settings_for("fedbio", rounds=1, secure=True, **OPTIONS))
    assert (tmp_path / "site-1" / PEERS).exists()
    before = direct.startup
    renewed = direct.startup.__wrapped__("site-2")
    monkeypatch.setattr(direct, "startup", lambda name: renewed if name == "site-2" else before(name))
    said = []
    with pytest.raises(RunFailed, match="refuses its part in a secure sum"):
        submit(tmp_path, settings_for("fedbio", rounds=1, run="second", secure=True, **OPTIONS), say=said.append)
    assert len([line for line in said if "The key of site-2 is not the one this site knows it by." in line]) == 3


# Sites that break.


def garbage(answer):
    drawn = np.random.default_rng(0)
    return {**answer, "arrays": [drawn.integers(0, np.iinfo(a.dtype).max, a.shape, a.dtype) for a in answer["arrays"]]}


def not_masked(answer):
    return {**answer, "arrays": [np.zeros_like(array) for array in answer["arrays"]]}


def wrong_length(answer):
    return {**answer, "arrays": [array[:-1] for array in answer["arrays"]]}


def clear(answer):
    return {**answer, "arrays": [np.zeros(array.shape) for array in answer["arrays"]]}


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [(garbage, "did not cancel"), (not_masked, "did not cancel"), (wrong_length, "instead of"), (clear, "instead of")],
)
def test_a_site_that_sends_something_else(tmp_path, spoil, sentence):
    def fault(task, name, request, answer):
        return spoil(answer) if (task, name) == ("work", "site-2") else answer

    with pytest.raises(RunFailed, match=sentence):
        submit(tmp_path, settings_for("fedbio", rounds=2, secure=True, **OPTIONS), fault)


def test_numbers_out_of_range_stay_at_the_site(tmp_path):
    settings = settings_for("fedbio", rounds=40, secure=True, outer_step=10.0, **OPTIONS)
    with pytest.raises(RunFailed, match=r"more than 2\^20 in size"):
        submit(tmp_path, settings)


@pytest.mark.parametrize("clip", [None, 1e9], ids=["as it is", "clipped"])
@pytest.mark.parametrize("factor", [1e9, np.nan])
def test_nobody_sees_which_site_is_out_of_range(tmp_path, factor, clip):
    """A refusal by name would compare a single reply with the bound, as often as a coordinator likes to ask; and a sum without
    that site would be of too few."""
    settings, said = settings_for("fedavg", rounds=1, secure=True, **OPTIONS), []
    sites = array_sites(tmp_path, settings, say=said.append, privacy=None if clip is None else Privacy(clip))
    with np.load(tmp_path / "site-2.npz") as rows:
        np.savez(tmp_path / "site-2.npz", **{name: rows[name] * factor for name in rows.files})
    channel = Direct(sites)
    with pytest.raises(RunFailed, match=r"1 of the 3 sites .* more than 2\^20 in size"):
        coordinate(tmp_path, settings, channel)
    assert not any("refused" in told for *_, told in channel.seen)
    assert "site-2" not in (tmp_path / "runs/run/log.txt").read_text().replace(", ".join(SITES), "")
    assert any("no sum" in line for line in said)
    parts = [WIDE.unpack(told["arrays"][0]) for task, _, told in channel.seen if task == "work"]
    assert np.abs(WIDE.decode(sum(parts))[:-1]).max() > 2**15, "nor is it a sum of the others"


def test_an_objective_out_of_range_is_not_recorded(tmp_path, monkeypatch):
    def large(*arguments, compiled=site.Compiled):
        made = copy.copy(compiled(*arguments))
        made.measure = lambda *_: 1e9
        return made

    monkeypatch.setattr(site, "Compiled", large)
    submit(tmp_path, settings_for("fedavg", rounds=1, record_every=1, secure=True, **OPTIONS))
    assert pd.read_csv(tmp_path / "runs/run/history.csv")["objective"].isna().all()


def test_single_replies_look_uniform_and_the_test_can_fail(tmp_path, monkeypatch):
    def captured(folder):
        folder.mkdir()
        settings = settings_for("fedbioacc", rounds=30, record_every=1, secure=True, **OPTIONS)
        _, channel = submit(folder, settings)
        return [told["arrays"][0] for task, _, told in channel.seen if task in ("work", "measure")]

    assert uniform(captured(tmp_path / "masked")) > 1e-6
    monkeypatch.setattr(secure, "_stream", lambda key, size: np.zeros(size, np.uint64))
    assert uniform(captured(tmp_path / "not")) < 1e-12


def test_noise_comes_before_the_mask_and_a_reply_is_paid_for_once(tmp_path):
    pytest.importorskip("dp_accounting")
    settings = settings_for("fedbio", rounds=2, secure=True, **OPTIONS)
    found, channel = submit(tmp_path, settings, privacy=Privacy(clip=0.5, noise=1.0))
    assert np.isfinite(found).all()
    assert {array.dtype for task, _, told in channel.seen if task == "work" for array in told["arrays"]} == {
        np.dtype("u2")
    }
    assert '"replies": 2' in (tmp_path / "site-1/privacy.json").read_text()


@pytest.mark.parametrize(
    ("secured", "weights", "spread"), [(True, "uniform", 3), (True, "samples", 1), (False, "uniform", 1)]
)
def test_noise_is_shared_by_the_sites_of_a_sum_and_by_nobody_else(tmp_path, monkeypatch, secured, weights, spread):
    """In a sum of three a site's noise has a third of the variance; where replies are seen, or weigh differently, all of it."""
    pytest.importorskip("dp_accounting")
    drawn = []
    monkeypatch.setattr(privacy, "normal", lambda shape: drawn.append(shape) or np.full(shape, 1.0))
    settings = settings_for("fedavg", rounds=1, weights=weights, secure=secured, local_steps=1, batch_size=4)
    found, _ = submit(tmp_path, settings, privacy=Privacy(clip=2e-6, noise=5e5, shared=True))
    assert len(drawn) == 3
    np.testing.assert_allclose(found, 1 / np.sqrt(spread), rtol=1e-5)  # from a model of zeros, nearly without a step


@pytest.mark.parametrize("method", ["fedminmax", "fedfb", "fairfed"])
def test_what_the_sites_agree_on_travels_as_sums(tmp_path, method):
    """Rows, curvatures, counts of groups: no number of a single site is told."""
    recipe = {"method": method, "steps": 4, "local_steps": 2, "batch_size": 16}
    arguments = {"arrays": {"features": 6, "groups": 2}, "recipe": recipe, "minimum_cell": 1}
    found, agreed = [], []
    for secured in (False, True):
        settings = JobSettings(f"fair-{secured}", "fair", SITES, arguments, secure=secured)
        folder = tmp_path / str(secured)
        folder.mkdir()
        rng = np.random.default_rng(0)
        sites, _ = fair_array_sites(folder, settings, rng, (61, 67, 71), 6, tell=("rows", "smoothness", "groups"))
        channel = Direct(sites)
        found.append(coordinate(folder, settings, channel)[0])
        agreed.append(Progress.read(folder / "runs" / settings.run / "state.npz").agreed)
        names = {name for _, _, told in channel.seen for name in told.get("numbers", {})}
        assert names >= {"rows", "rows/sizes", "smoothness"} if not secured else not names
        assert any("rows" in told for _, _, told in channel.seen) is not secured
    if method != "fedfb":  # at a model of zeros all groups have the same loss, and FedFB steps along what is rounded
        np.testing.assert_allclose(*found, atol=1e-6)
    for name, value in agreed[0].items():
        np.testing.assert_allclose(value, agreed[1][name], rtol=1e-14, err_msg=name)


# What takes part in what.


def test_methods_that_need_single_replies_name_others(tmp_path):
    arguments = {"algorithms": ["fcfl"], "rounds": 1, "double": True}
    settings = JobSettings("run", programs.SEVERAL, SITES, arguments, double=True, secure=True)
    sites = array_sites(tmp_path, settings, functions=(programs.SEVERAL,))
    asked = {"digest": settings.digest, "stage": 0, "agreed": {}, "answers": []}
    assert sites["site-1"].answer("prepare", asked) == {"refused": "single"}
    made = programs.fair_algorithm(np.float64)
    data = fb.ClientData.from_clients([(programs.fair_rows(client, np.float64), None) for client in range(3)])
    with pytest.raises(
        ValueError, match=r"fcfl needs every client's reply by itself .* use fedpath, fedbioacc, fedbio, fedavg"
    ):
        fb.simulate(made, data, 1, secure=True)


@pytest.mark.parametrize(
    ("sites", "secured", "policy", "refused"),
    [
        (3, False, {"secure_sums": "from-three"}, "takes part in secure sums only"),
        (2, False, {"secure_sums": "from-three"}, None),
        (2, True, {"secure_sums": "from-three"}, None),
        (2, True, {"secure_sums": "from-three", "minimum_sites": 4}, "fewer sites, or of others, than this site wants"),
        (2, True, {"secure_sums": "always"}, "takes part in secure sums only"),
        (3, True, {"secure_sums": "always"}, None),
        (3, True, {"minimum_sites": 4}, "fewer sites, or of others, than this site wants"),
        (3, True, {"partners": ("site-1", "site-2")}, "fewer sites, or of others, than this site wants"),
        (3, True, {"partners": SITES}, None),
        (3, False, {"secure_sums": "optional"}, None),
    ],
)
def test_what_a_site_takes_part_in(tmp_path, sites, secured, policy, refused):
    settings = settings_for("fedavg", rounds=1, secure=secured, sites=SITES[:sites], **OPTIONS)
    if refused is None:
        assert np.isfinite(submit(tmp_path, settings, **policy)[0]).all()
    else:
        with pytest.raises(RunFailed, match=refused):
            submit(tmp_path, settings, **policy)
