"""Secure sums: right with every pattern of lost sites, and refused where somebody plays a trick."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fedbilevel.engines.fixed import NARROW, WIDE, OutOfRange, to_mean, to_words
from fedbilevel.federation.protocol import secure
from fedbilevel.federation.protocol.secure import Cohort, Insecure, SecureSite, join, recovered, share

LABEL = "weights/3/0"


class Known:
    """Keys that everybody knows, in place of certificates."""

    certificate = b""

    def __init__(self, keys, name):
        self.keys, self.sign = keys, keys[name].sign

    def verify(self, whose, certificate, message, signature):
        self.keys[whose].public_key().verify(signature, message)


class Federation:
    """Sites that have met, and numbers of their own."""

    def __init__(self, count=5, size=4):
        names = [f"site{number}" for number in range(count)]
        self.cohort = Cohort.usual("run", names)
        self.certificates = {
            name: Ed25519PrivateKey.from_private_bytes(bytes([place] * 32)) for place, name in enumerate(names)
        }
        self.sites = {name: self.site(name) for name in names}
        self.hellos = [site.hello() for site in self.sites.values()]
        for site in self.sites.values():
            site.meet(self.hellos)
        self.values = {name: np.random.default_rng(place).normal(size=size) for place, name in enumerate(names)}

    def site(self, name, **options):
        return SecureSite(name, self.cohort, name.encode().ljust(32), Known(self.certificates, name), **options)

    def adverts(self, names=None):
        return (
            [] if self.cohort.complete else [self.sites[name].advertise(LABEL) for name in names or self.cohort.names]
        )

    def mask(self, name, adverts, added=0.0, label=LABEL):
        return self.sites[name].mask(label, adverts, WIDE.encode(self.values[name] + added))

    def shares(self, adverts, alive, givers=None):
        givers = () if self.cohort.complete else givers or alive
        return {name: self.sites[name].unmask(LABEL, adverts, alive) for name in givers}

    def total(self, advertised, alive, givers=None):
        adverts = self.adverts(advertised)
        masked = {name: self.mask(name, adverts) for name in alive}
        return WIDE.decode(recovered(self.cohort, LABEL, adverts, masked, self.shares(adverts, alive, givers)))


@settings(max_examples=25, deadline=None)
@given(st.integers(3, 7), st.data())
def test_the_sum_of_those_who_answered(count, data):
    made = Federation(count)
    some = [data.draw(st.integers(made.cohort.threshold, count)) for _ in range(3)]
    advertised, alive, givers = (list(made.cohort.names[:number]) for number in sorted(some, reverse=True))
    expected = sum(np.rint(made.values[name] * 2**42) / 2**42 for name in alive)
    assert np.array_equal(made.total(advertised, alive, givers), expected)


@pytest.mark.parametrize("count", [3, 4, 9])
@pytest.mark.parametrize("ring", [WIDE, NARROW])
def test_means_at_the_ends_of_the_range(ring, count):
    """Words travel in as many bits as the ring has, and what is lost above them is not missed."""
    share, reply = 2.0 ** -np.ceil(np.log2(count)), [np.array([ring.largest, -ring.largest, 1e-9, 0.0], np.float32)]
    words = [ring.unpack(ring.pack(to_words(reply, share, ring))) for _ in range(count)]
    (mean,) = to_mean(ring.unpack(ring.pack(np.sum(words, axis=0))), reply, ring)
    np.testing.assert_allclose(mean, reply[0], atol=count * 2.0**-ring.bits, rtol=0)
    assert np.array_equal(mean[[0, 1, 3]], reply[0][[0, 1, 3]])
    with pytest.raises(OutOfRange, match="beyond"):
        ring.encode(1.01 * ring.largest)


def test_a_sum_that_needs_every_site_shares_nothing():
    made = Federation(3)
    site = made.sites["site0"]
    for ask in (lambda: site.advertise(LABEL), lambda: site.unmask(LABEL, [], made.cohort.names)):
        with pytest.raises(Insecure, match="nothing is unmasked"):
            ask()
    with pytest.raises(Insecure, match="fewer than the 3"):
        recovered(made.cohort, LABEL, [], {name: made.mask(name, []) for name in made.cohort.names[:2]}, {})
    with pytest.raises(Insecure, match="not met"):
        made.site("site0").mask(LABEL, [], np.zeros(1, np.uint64))
    with pytest.raises(Insecure, match="another question"):
        made.mask("site0", [], added=1.0)


@given(st.binary(min_size=31, max_size=31), st.binary(min_size=32, max_size=32), st.integers(2, 6))
@settings(max_examples=20, deadline=None)
def test_a_threshold_of_shares_makes_the_secret_and_fewer_do_not(secret, seed, threshold):
    shares = dict(enumerate(share(secret, threshold, 7, seed), 1))
    chosen = dict(list(shares.items())[-threshold:])
    assert join(chosen) == int.from_bytes(secret, "big")
    assert join(dict(list(chosen.items())[1:])) != int.from_bytes(secret, "big")


def test_a_site_that_was_killed_goes_on_with_the_same_numbers():
    made = Federation()
    adverts = made.adverts()
    before = made.mask("site2", adverts)
    again = made.site("site2", answered=made.sites["site2"].answered)
    again.meet(made.hellos)
    assert again.advertise(LABEL) == adverts[2]
    made.sites["site2"] = again
    assert np.array_equal(made.mask("site2", adverts), before)


def swapped_key(made, site):
    adverts = made.adverts()
    stranger = Ed25519PrivateKey.generate().sign(b"anything")
    adverts[1] = adverts[1]._replace(key=adverts[2].key, signature=stranger)
    made.mask("site0", adverts)


def swapped_greeting(made, site):
    made.site("site0").meet([made.hellos[0], made.hellos[1]._replace(key=made.hellos[2].key), *made.hellos[2:]])


def a_greeting_missing(made, site):
    made.site("site0").meet(made.hellos[1:])


def too_few_greetings(made, site):
    made.site("site0").meet(made.hellos[:3])


def two_lists_of_survivors(made, site):
    adverts = made.adverts()
    made.mask("site0", adverts)
    site.unmask(LABEL, adverts, made.cohort.names)
    site.unmask(LABEL, adverts, made.cohort.names[:-1])


def two_questions(made, site):
    adverts = made.adverts()
    made.mask("site0", adverts)
    made.mask("site0", adverts, added=1.0)


def two_cohorts_for_one_label(made, site):
    made.mask("site0", made.adverts())
    made.mask("site0", made.adverts(made.cohort.names[:-1]))


def another_submission_with_fewer(made, site):
    for label, alive in (("1.0", made.cohort.names), ("2.0", made.cohort.names[:-1])):
        adverts = [each.advertise(label) for each in made.sites.values()]
        site.mask(label, adverts, np.zeros(1, np.uint64), "work/0/3/0")
        site.unmask(label, adverts, alive)


def a_round_replayed(made, site):
    made.mask("site0", made.adverts(), label="weights/4/0")


def all_but_one_are_gone(made, site):
    adverts = made.adverts()
    made.mask("site0", adverts)
    site.unmask(LABEL, adverts, ["site0"])


def left_out_of_its_own_list(made, site):
    adverts = made.adverts()
    made.mask("site0", adverts)
    site.unmask(LABEL, adverts, made.cohort.names[1:])


def unmask_before_masking(made, site):
    site.unmask(LABEL, made.adverts(), made.cohort.names)


def a_lower_threshold(made, site):
    Cohort("run", made.cohort.names, 2)


def a_letter_changed(made, site):
    adverts = made.adverts()
    letters = {**adverts[1].letters, "site0": adverts[2].letters["site0"]}
    adverts[1] = adverts[1]._replace(letters=letters)
    made.mask("site0", adverts)
    site.unmask(LABEL, adverts, made.cohort.names)


def too_large_a_number(made, site):
    made.mask("site0", made.adverts(), added=2.0**21)


def not_a_number(made, site):
    made.mask("site0", made.adverts(), added=np.nan)


ATTACKS = {
    swapped_key: "not signed by it", swapped_greeting: "not signed by it", a_greeting_missing: "not those of the cohort",
    too_few_greetings: "fewer than the 4",
    two_lists_of_survivors: "another list of survivors", two_questions: "another question",
    another_submission_with_fewer: "work/0/3/0 was unmasked before",
    two_cohorts_for_one_label: "another question", a_round_replayed: "not signed by it",
    all_but_one_are_gone: "nothing is unmasked", left_out_of_its_own_list: "leaves out",
    unmask_before_masking: "masked nothing", a_lower_threshold: "will not do", a_letter_changed: "cannot be opened",
    too_large_a_number: "beyond", not_a_number: "NaN",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attacks_are_refused(attack):
    made = Federation()
    with pytest.raises((Insecure, OutOfRange), match=ATTACKS[attack]):
        attack(made, made.sites["site0"])


@pytest.mark.parametrize("kind", ["seeds", "keys"])
def test_a_wrong_share_ends_the_round(kind):
    made = Federation()
    alive, adverts = list(made.cohort.names[:-1]), made.adverts()
    masked, shares = {name: made.mask(name, adverts) for name in alive}, made.shares(adverts, alive)
    given = getattr(shares["site0"], kind)
    name = next(iter(given))
    shares["site0"] = shares["site0"]._replace(**{kind: {**given, name: given[name] + 1}})
    with pytest.raises(Insecure, match="a site gave a wrong one"):
        recovered(made.cohort, LABEL, adverts, masked, shares)


def test_too_few_shares_give_no_sum():
    made = Federation()
    adverts = made.adverts()
    masked = {name: made.mask(name, adverts) for name in made.cohort.names}
    few = made.shares(adverts, made.cohort.names, made.cohort.names[: made.cohort.threshold - 1])
    with pytest.raises(Insecure, match="the round has no sum"):
        recovered(made.cohort, LABEL, adverts, masked, few)


@pytest.mark.parametrize("count", range(3, 12))
def test_both_secrets_of_a_site_would_need_more_answers_than_there_are_sites(count):
    cohort = Cohort.usual("run", [f"{number:02d}" for number in range(count)])
    assert 2 * cohort.threshold > count


def uniform(messages):
    """The p-value of the bytes of captured messages under uniform bytes."""
    counts = np.bincount(np.frombuffer(b"".join(words.tobytes() for words in messages), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), 255)


@pytest.mark.parametrize("count", [3, 4])
def test_single_replies_look_uniform_and_the_test_can_fail(monkeypatch, count):
    def captured():
        made = Federation(count, size=2000)
        adverts = made.adverts()
        return [made.mask(name, adverts) for name in made.cohort.names]

    assert uniform(captured()) > 1e-4  # masks follow from fixed secrets: the same every time
    monkeypatch.setattr(secure, "_stream", lambda key, size: np.zeros(size, np.uint64))
    assert uniform(captured()) < 1e-12
