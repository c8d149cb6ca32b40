"""Clipping, noise and the account that a site keeps of its replies."""

import importlib
import json
import random
import secrets
import sys

import numpy as np
import pytest
from scipy.stats import norm

from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol import privacy as privacy_module
from fedbilevel.federation.protocol.door import Door
from fedbilevel.federation.protocol.policy import Policy, Privacy
from fedbilevel.federation.protocol.privacy import Account, Guard, clip_and_blur, read_account, references
from fedbilevel.federation.protocol.settings import RunFailed
from fedbilevel.federation.protocol.vault import Label
from tests.federation.direct import Runs

LABEL = Label(0, 3, 0, 1)


def library():
    return hasattr(importlib.import_module("dp_accounting"), "get_epsilon_gaussian")


needs_library = pytest.mark.skipif(
    importlib.util.find_spec("dp_accounting") is None or not library(),
    reason="needs the privacy extra: dp-accounting 0.6 or later",
)


@pytest.fixture
def accountant(monkeypatch):
    """The rule itself in place of the library, where only the book-keeping is looked at."""
    monkeypatch.setattr(privacy_module, "gaussian_epsilon", lambda noise, delta: 1 / noise**2)


def test_references_are_what_was_sent():
    x, nu, step = np.ones(3), np.zeros(3), np.zeros((), np.int32)
    found = references([2 * x, 3 * x, np.ones((2, 3))], [x, nu, step])
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_array_equal(found[1], nu)
    np.testing.assert_array_equal(found[2], np.zeros((2, 3)))


def test_the_whole_difference_is_cut_to_the_norm():
    sent = [np.array([1.0, 2.0]), np.array([5.0])]
    reply = [np.array([1.0, 5.0]), np.array([9.0])]  # differences (0, 3) and 4: norm 5
    cut = clip_and_blur(reply, sent, Privacy(clip=1.0))
    np.testing.assert_allclose(cut[0], [1.0, 2.6])
    np.testing.assert_allclose(cut[1], [5.8])
    whole = clip_and_blur(reply, sent, Privacy(clip=6.0))
    np.testing.assert_allclose(whole[0], reply[0])
    same = clip_and_blur(sent, sent, Privacy(clip=1.0))
    np.testing.assert_array_equal(same[1], sent[1])


def test_noise_has_the_stated_size_and_type():
    zeros = [np.zeros(200_000, np.float32)]
    (noisy,) = clip_and_blur(zeros, zeros, Privacy(clip=2.0, noise=0.5))
    assert noisy.dtype == np.float32
    # 200,000 draws: the spread is known to half a percent with near certainty.  The generator cannot be seeded.
    assert noisy.std() == pytest.approx(1.0, rel=0.01)
    assert abs(noisy.mean()) < 0.02
    assert norm.cdf(-2) == pytest.approx((noisy < -2).mean(), rel=0.1), "the tails are those of the normal law"


def test_noise_is_the_operating_systems_and_nothing_seeds_it(monkeypatch):
    """Whoever could guess the state of a generator could take the noise away."""
    zeros = [np.zeros(64)]
    drawn = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        drawn.append(clip_and_blur(zeros, zeros, Privacy(clip=1.0, noise=1.0))[0])
    assert not np.array_equal(*drawn)
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"\x5a" * count)
    (noisy,) = clip_and_blur(zeros, zeros, Privacy(clip=1.0, noise=1.0))
    assert len(set(noisy)) == 1, "all of it comes from there"


def protected(folder, privacy, reply, sent, label=LABEL, run="run"):
    """What a guard lets out of ``reply``, an array or a function that makes it, in answer to the array ``sent``."""
    (folder / run).mkdir(exist_ok=True)
    compute = reply if callable(reply) else lambda: [reply]
    like = [sent if callable(reply) else reply]
    (out,) = Guard(privacy, folder, run, run).protect(
        compute, like, [sent], privacy_module.fingerprint("work", label, [sent])
    )
    return out


def test_what_cannot_be_blurred_is_refused(tmp_path):
    with pytest.raises(Refused, match="whole numbers"):
        protected(tmp_path, Privacy(1.0), np.arange(3), np.arange(3))
    reply, sent = np.array([np.nan, 7.0]), [np.zeros(2)]
    assert np.isnan(protected(tmp_path, Privacy(1.0), reply, sent[0])).all(), "not a number of it is left"
    for privacy in (None, Privacy(1.0)):
        door = Door(Policy(privacy=privacy), tmp_path, "run", "digest", print)
        with pytest.raises(Refused, match="not finite"):
            door.reply("work", lambda: [reply], sent, sent, LABEL)


@pytest.mark.parametrize("trouble", [np.full(3, np.nan), np.full(3, np.inf), 1 / 3], ids=["nan", "infinite", "error"])
def test_with_noise_trouble_looks_and_costs_like_any_reply(tmp_path, accountant, trouble):
    """An error that tells, or one that costs nothing, brackets the true gradient by the steps that make it overflow."""

    def compute():
        if isinstance(trouble, float):
            raise ZeroDivisionError("row 17 holds 0")
        return [trouble]

    out = protected(tmp_path, Privacy(1.0, 2.0), compute, np.full(3, 5.0))
    assert np.isfinite(out).all()
    assert np.abs(out - 5).max() < 2 * 8, "what was sent, and noise"
    assert read_account(tmp_path) == Account(1, 0.25)


def test_the_same_request_gets_the_same_reply_and_is_counted_once(tmp_path, accountant):
    def released(sent, label=LABEL):
        return protected(tmp_path, Privacy(1.0, 2.0), np.ones(4), np.full(4, sent), label)

    first = released(0.0)
    np.testing.assert_array_equal(first, released(0.0, LABEL._replace(attempt=2)))
    assert read_account(tmp_path) == Account(1, 0.25)
    assert not np.array_equal(first, released(0.1))
    assert read_account(tmp_path) == Account(2, 0.5)


def test_the_budget_holds_over_all_runs_of_a_site(tmp_path, accountant):
    sent, reply = np.zeros(4), np.ones(4)
    allowed = Privacy(1.0, 2.0, epsilon=0.8)  # a reply costs 1/4 by the rule above
    computed = []
    for number, run in enumerate(("a", "b", "c", "d")):
        if number < 3:
            protected(tmp_path, allowed, reply, sent, run=run)
        else:
            with pytest.raises(Refused, match=r"privacy budget. \(epsilon 0.8 at delta 1e-05, in 3 replies\)"):
                protected(tmp_path, allowed, lambda: computed.append("it was"), sent, run=run)
            assert computed == [], "what cannot be paid for is not computed"


@pytest.mark.parametrize(
    "text", ["", "{}", '{"replies": -1, "inverse_squares": 0}', '{"replies": 1, "inverse_squares": NaN}']
)
def test_a_damaged_account_releases_nothing(tmp_path, text):
    (tmp_path / privacy_module.ACCOUNT).write_text(text)
    with pytest.raises(Refused, match="releases nothing more"):
        read_account(tmp_path)


@pytest.mark.usefixtures("shared_compilation")
def test_a_measured_objective_is_on_the_account(tmp_path, accountant):
    run = Runs(tmp_path, 3, record_every=1)
    run.submit(privacy=Privacy(0.5, 4.0))
    assert read_account(tmp_path / "site-1").replies == 3 + 3
    measured = [told["objective"] for task, name, told in run.channel.seen if (task, name) == ("measure", "site-1")]
    assert len(measured) == len(set(measured)) == 3
    assert np.abs(measured).max() < 0.5 + 0.5 * 4 * 8, "cut to 0.5 and blurred by 2"


def first_reply(run):
    return next(told["arrays"][0] for task, name, told in run.channel.seen if (task, name) == ("work", "site-1"))


@pytest.mark.usefixtures("shared_compilation")
def test_a_run_with_noise_goes_on_until_a_budget_is_spent(tmp_path, accountant):
    blurred, plain = Runs(tmp_path), Runs(tmp_path, 3, run="plain")
    with pytest.raises(RunFailed, match="spent its privacy budget"):
        blurred.submit(privacy=Privacy(0.1, 1.0, epsilon=3.5))
    assert json.loads((tmp_path / "site-1" / privacy_module.ACCOUNT).read_text())["replies"] == 3
    plain.submit()
    noisy = first_reply(blurred)
    assert not np.allclose(noisy, first_reply(plain))
    assert np.linalg.norm(noisy) < 0.1 + 0.1 * 6 * np.sqrt(len(noisy)), "cut to 0.1 and blurred by 0.1"


@pytest.mark.usefixtures("shared_compilation")
def test_clipping_alone_needs_no_account(tmp_path):
    run = Runs(tmp_path, 2)
    run.submit(privacy=Privacy(0.01))
    assert np.linalg.norm(first_reply(run)) == pytest.approx(0.01)
    assert not (tmp_path / "site-1" / privacy_module.ACCOUNT).exists()


@needs_library
@pytest.mark.parametrize(("noise", "replies"), [(1.0, 1), (2.0, 30), (5.0, 400)])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise, replies):
    account = Account(replies, replies * noise**-2)
    epsilon = account.epsilon(1e-5)
    one = noise / np.sqrt(replies)
    # Balle and Wang 2018, Thm. 8: the exact delta of one Gaussian mechanism.
    delta = norm.cdf(0.5 / one - epsilon * one) - np.exp(epsilon) * norm.cdf(-0.5 / one - epsilon * one)
    assert delta == pytest.approx(1e-5, rel=1e-6)
    accounting = importlib.import_module("dp_accounting")
    loose = accounting.rdp.RdpAccountant()
    loose.compose(accounting.GaussianDpEvent(noise), replies)
    assert epsilon < loose.get_epsilon(1e-5) < 1.2 * epsilon + 0.5


def test_without_the_library_a_site_says_so_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(Refused, match="need the package dp-accounting"):
        Guard(Privacy(1.0, 1.0), tmp_path, "run", "d")
