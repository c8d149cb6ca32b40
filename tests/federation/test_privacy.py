"""Clipping, noise and the account that a site keeps of its replies."""

import importlib
import json
import sys

import numpy as np
import pytest
from scipy.stats import norm

from fedbilevel.engines.stages import Refused
from fedbilevel.federation.protocol import privacy
from fedbilevel.federation.protocol.policy import Privacy
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
    monkeypatch.setattr(privacy, "gaussian_epsilon", lambda noise, delta: 1 / noise**2)


def test_references_are_what_was_sent():
    x, nu, step = np.ones(3), np.zeros(3), np.zeros((), np.int32)
    found = references([2 * x, 3 * x, np.ones((2, 3))], [x, nu, step])
    np.testing.assert_array_equal(found[0], x)
    np.testing.assert_array_equal(found[1], nu)
    np.testing.assert_array_equal(found[2], np.zeros((2, 3)))


def test_the_whole_difference_is_cut_to_the_norm():
    sent = [np.array([1.0, 2.0]), np.array([5.0])]
    reply = [np.array([1.0, 5.0]), np.array([9.0])]  # differences (0, 3) and 4: norm 5
    cut = clip_and_blur(reply, sent, Privacy(clip=1.0), np.random.default_rng())
    np.testing.assert_allclose(cut[0], [1.0, 2.6])
    np.testing.assert_allclose(cut[1], [5.8])
    whole = clip_and_blur(reply, sent, Privacy(clip=6.0), np.random.default_rng())
    np.testing.assert_allclose(whole[0], reply[0])
    same = clip_and_blur(sent, sent, Privacy(clip=1.0), np.random.default_rng())
    np.testing.assert_array_equal(same[1], sent[1])


def test_noise_has_the_stated_size_and_type():
    zeros = [np.zeros(200_000, np.float32)]
    (noisy,) = clip_and_blur(zeros, zeros, Privacy(clip=2.0, noise=0.5), np.random.default_rng(0))
    assert noisy.dtype == np.float32
    # 200,000 draws: the spread is known to half a percent with near certainty.
    assert noisy.std() == pytest.approx(1.0, rel=0.01)
    assert abs(noisy.mean()) < 0.02


def test_what_cannot_be_blurred_is_refused():
    with pytest.raises(Refused, match="whole numbers"):
        clip_and_blur([np.arange(3)], [np.arange(3)], Privacy(1.0), np.random.default_rng())
    with pytest.raises(Refused, match="not finite"):
        clip_and_blur([np.array([np.nan])], [np.zeros(1)], Privacy(1.0), np.random.default_rng())


def test_the_same_request_gets_the_same_reply_and_is_counted_once(tmp_path, accountant):
    (tmp_path / "run").mkdir()

    def released(sent, label=LABEL):
        return Guard(Privacy(1.0, 2.0), tmp_path, "run", "d").protect([np.ones(4)], [np.full(4, sent)], label)[0]

    first = released(0.0)
    np.testing.assert_array_equal(first, released(0.0, LABEL._replace(attempt=2)))
    assert read_account(tmp_path) == Account(1, 0.25)
    assert not np.array_equal(first, released(0.1))
    assert read_account(tmp_path) == Account(2, 0.5)


def test_the_budget_holds_over_all_runs_of_a_site(tmp_path, accountant):
    sent, reply = [np.zeros(4)], [np.ones(4)]
    allowed = Privacy(1.0, 2.0, epsilon=0.8)  # a reply costs 1/4 by the rule above
    for number, run in enumerate(("a", "b", "c", "d")):
        (tmp_path / run).mkdir()
        guard = Guard(allowed, tmp_path, run, run)
        if number < 3:
            guard.protect(reply, sent, LABEL)
        else:
            with pytest.raises(Refused, match=r"spent its privacy budget \(epsilon 0.8 at delta 1e-05\) in 3 replies"):
                guard.protect(reply, sent, LABEL)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"replies": -1, "inverse_squares": 0}', '{"replies": 1, "inverse_squares": NaN}']
)
def test_a_damaged_account_releases_nothing(tmp_path, text):
    (tmp_path / privacy.ACCOUNT).write_text(text)
    with pytest.raises(Refused, match="releases nothing more"):
        read_account(tmp_path)


def first_reply(run):
    return next(told["arrays"][0] for task, name, told in run.channel.seen if (task, name) == ("work", "site-1"))


@pytest.mark.usefixtures("shared_compilation")
def test_a_run_with_noise_goes_on_until_a_budget_is_spent(tmp_path, accountant):
    blurred, plain = Runs(tmp_path), Runs(tmp_path, 3, run="plain")
    with pytest.raises(RunFailed, match="spent its privacy budget"):
        blurred.submit(privacy=Privacy(0.1, 1.0, epsilon=3.5))
    assert json.loads((tmp_path / "site-1" / privacy.ACCOUNT).read_text())["replies"] == 3
    plain.submit()
    noisy = first_reply(blurred)
    assert not np.allclose(noisy, first_reply(plain))
    assert np.linalg.norm(noisy) < 0.1 + 0.1 * 6 * np.sqrt(len(noisy)), "cut to 0.1 and blurred by 0.1"


@pytest.mark.usefixtures("shared_compilation")
def test_clipping_alone_needs_no_account(tmp_path):
    run = Runs(tmp_path, 2)
    run.submit(privacy=Privacy(0.01))
    assert np.linalg.norm(first_reply(run)) == pytest.approx(0.01)
    assert not (tmp_path / "site-1" / privacy.ACCOUNT).exists()


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
