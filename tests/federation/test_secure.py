"""Secure sums: right with every pattern of lost sites, and refused where somebody plays a trick."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from fedbilevel.engines.fixed import NARROW, WIDE, OutOfRange, to_mean, to_words
from fedbilevel.federation.protocol import secure
from fedbilevel.federation.protocol.secure import PRIME, Answered, Cohort, Insecure, SecureSite, lagrange, recovered

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

    def mask(self, name, present=None, added=0.0, label=LABEL):
        words = WIDE.encode(self.values[name] + added)
        return self.sites[name].mask(label, list(present or self.cohort.names), words)

    def letters(self, masked, name):
        """Those that the masked numbers of ``masked`` brought for a site."""
        numbers = {other: self.cohort.letter(other, name) for other in masked}
        return {other: masked[other].letters[number] for other, number in numbers.items() if number is not None}

    def unmask(self, name, masked, alive=None, label=LABEL):
        alive = list(alive or masked)
        return self.sites[name].unmask(label, alive, self.letters({other: masked[other] for other in alive}, name))

    def total(self, present, *alive, givers=None):
        """``alive``: those whose masked numbers came, and then, again and again, those who repaired the sum."""
        masked = {name: self.mask(name, present) for name in alive[0]}
        repairs, shares = [], {}
        for first, left in zip(alive, [*alive[1:], alive[-1]], strict=True):
            if len(first) < len(present):
                repairs = [self.sites[name].repair(LABEL, first) for name in left]
        masked = {name: masked[name] for name in alive[-1]}
        if not self.cohort.complete:
            shares = {name: self.unmask(name, masked) for name in givers or alive[-1]}
        return WIDE.decode(recovered(self.cohort, LABEL, masked, repairs, shares))


@settings(max_examples=40, deadline=None)
@given(st.integers(3, 7), st.data())
def test_the_sum_of_those_who_answered(count, data):
    """With any sites lost before they mask, before they repair, and before they unmask."""
    made = Federation(count)
    left = list(made.cohort.names)
    lists = []
    for _ in range(5):
        lost = data.draw(st.sets(st.sampled_from(left), max_size=len(left) - made.cohort.threshold))
        left = [name for name in left if name not in lost]
        lists.append(left)
    present, masked, repaired, again, givers = lists
    chain = [masked] if masked == present else [masked, repaired, again]
    expected = sum(np.rint(made.values[name] * 2**42) / 2**42 for name in chain[-1])
    found = made.total(present, *chain, givers=[name for name in givers if name in chain[-1]])
    assert np.array_equal(found, expected)


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
    site, names = made.sites["site0"], made.cohort.names
    for ask in (lambda: site.repair(LABEL, names), lambda: site.unmask(LABEL, names, {})):
        with pytest.raises(Insecure, match="nothing is unmasked"):
            ask()
    with pytest.raises(Insecure, match="fewer than the 3"):
        recovered(made.cohort, LABEL, {name: made.mask(name) for name in names[:2]}, [], {})
    with pytest.raises(Insecure, match="2 sites are not the 3"):
        made.mask("site0", names[:2], label="other")
    with pytest.raises(Insecure, match="not met"):
        made.site("site0").mask(LABEL, names, np.zeros(1, np.uint64))
    with pytest.raises(Insecure, match="another question"):
        made.mask("site0", added=1.0)


@given(st.lists(st.integers(0, PRIME - 1), min_size=2, max_size=6), st.data())
@settings(max_examples=20, deadline=None)
def test_values_of_a_polynomial_make_every_other_value(coefficients, data):
    """Against Horner's rule in whole numbers; with one value less they make something else."""
    value = lambda at: sum(each * at**power for power, each in enumerate(coefficients)) % PRIME  # noqa: E731
    places = data.draw(
        st.lists(st.integers(1, 50), min_size=len(coefficients), max_size=len(coefficients), unique=True)
    )
    for at in (0, 51):
        assert sum(
            weight * value(place) for weight, place in zip(lagrange(places, [at])[0], places, strict=True)
        ) % PRIME == value(at)
    coefficients[-1] = coefficients[-1] or 1
    fewer = places[1:]
    made = sum(weight * value(place) for weight, place in zip(lagrange(fewer, [0])[0], fewer, strict=True)) % PRIME
    assert made != value(0)


def test_any_threshold_of_shares_makes_the_seed_and_fewer_do_not():
    """...also where a site of the cohort has met nobody, whose share nobody has."""
    made = Federation(6)
    met = made.hellos[:-1]
    for name in made.cohort.names[:-1]:
        made.sites[name].meet(met)
    names = [hello.name for hello in met]
    masked = {name: made.mask(name, names) for name in names}
    shares = {name: made.unmask(name, masked) for name in names}
    totals = [
        WIDE.decode(
            recovered(made.cohort, LABEL, masked, [], {name: shares[name] for name in names if name != left_out})
        )
        for left_out in names
    ]
    assert len({total.tobytes() for total in totals}) == 1
    np.testing.assert_allclose(totals[0], sum(made.values[name] for name in names))
    places = [made.cohort.places[name] for name in names[: made.cohort.threshold - 1]]
    for whose in names:
        few = [shares[name][whose] for name in names[: made.cohort.threshold - 1]]
        seed = sum(weight * each for weight, each in zip(lagrange(places, [0])[0], few, strict=True)) % PRIME
        assert secure._digest(made.cohort, LABEL, whose, seed) != masked[whose].seed


def test_a_site_that_was_killed_goes_on_with_the_same_numbers(tmp_path):
    made = Federation()
    kept = [Answered(tmp_path / "answered"), None]
    site = made.sites["site2"] = made.site("site2", answered=kept[0])
    site.meet(made.hellos)
    before, alive = made.mask("site2"), made.cohort.names[:4]
    repaired = site.repair(LABEL, alive)
    again = made.sites["site2"] = made.site("site2", answered=Answered(tmp_path / "answered"))
    again.meet(made.hellos)
    with pytest.raises(Insecure, match="not what this site has masked last"):
        again.repair(LABEL, alive)
    after = made.mask("site2")
    assert np.array_equal(after.words, before.words)
    assert after[1:] == before[1:]
    assert np.array_equal(again.repair(LABEL, alive), repaired)
    with pytest.raises(Insecure, match="another list of survivors than the one it was repaired for"):
        made.unmask("site2", {name: made.mask(name) for name in made.cohort.names})


def swapped_greeting(made, site):
    made.site("site0").meet([made.hellos[0], made.hellos[1]._replace(key=made.hellos[2].key), *made.hellos[2:]])


def a_greeting_missing(made, site):
    made.site("site0").meet(made.hellos[1:])


def too_few_greetings(made, site):
    made.site("site0").meet(made.hellos[:3])


def a_greeting_of_another_run(made, site):
    """Signed by its site, with a key that the coordinator might have found out since."""
    before = SecureSite(
        "site1", Cohort.usual("earlier", made.cohort.names), bytes(32), Known(made.certificates, "site1")
    )
    made.site("site0").meet([made.hellos[0], before.hello(), *made.hellos[2:]])


def two_lists_of_survivors(made, site):
    masked = {name: made.mask(name) for name in made.cohort.names}
    made.unmask("site0", masked)
    site.repair(LABEL, made.cohort.names[:-1])


def both_kinds(made, site):
    """What a lost site's masks left, and then a share of its seed."""
    masked = {name: made.mask(name) for name in made.cohort.names}
    site.repair(LABEL, made.cohort.names[:-1])
    made.unmask("site0", masked)


def both_kinds_in_two_submissions(made, site):
    for label in ("1.0", "2.0"):
        masked = {
            name: each.mask(label, made.cohort.names, np.zeros(1, np.uint64), "work/0/3/0")
            for name, each in made.sites.items()
        }
        if label == "1.0":
            made.unmask("site0", masked, label=label)
    site.repair("2.0", made.cohort.names[:-1])


def unmasked_without_repair(made, site):
    masked = {name: made.mask(name) for name in made.cohort.names[:-1]}
    made.unmask("site0", masked)


def lists_that_are_not_parts_of_each_other(made, site):
    """Of seven sites five are needed: six, then another six."""
    seven = Federation(7)
    names = seven.cohort.names
    seven.mask("site0")
    seven.sites["site0"].repair(LABEL, names[:-1])
    seven.sites["site0"].repair(LABEL, (*names[:-2], names[-1]))


def repaired_with_nobody_lost(made, site):
    made.mask("site0")
    site.repair(LABEL, made.cohort.names)


def two_questions(made, site):
    made.mask("site0")
    made.mask("site0", added=1.0)


def two_cohorts_for_one_label(made, site):
    made.mask("site0")
    made.mask("site0", made.cohort.names[:-1])


def another_submission_with_fewer(made, site):
    for label, alive in (("1.0", made.cohort.names), ("2.0", made.cohort.names[:-1])):
        masked = {name: made.sites[name].mask(label, alive, np.zeros(1, np.uint64), "work/0/3/0") for name in alive}
        made.unmask("site0", masked, label=label)


def shares_of_an_earlier_sum(made, site):
    """Asked for after a later one, when sites have been lost since."""
    masked = {name: made.mask(name) for name in made.cohort.names}
    made.mask("site0", label="weights/4/0")
    made.unmask("site0", masked)


def strangers_take_part(made, site):
    made.mask("site0", [*made.cohort.names, "site9"])


def too_few_take_part(made, site):
    made.mask("site0", made.cohort.names[:3])


def all_but_one_are_gone(made, site):
    made.mask("site0")
    site.repair(LABEL, ["site0"])


def all_but_one_are_gone_and_nothing_repaired(made, site):
    made.mask("site0")
    site.unmask(LABEL, ["site0"], {})


def left_out_of_its_own_list(made, site):
    made.mask("site0")
    site.repair(LABEL, made.cohort.names[1:])


def unmask_before_masking(made, site):
    site.unmask(LABEL, made.cohort.names, {})


def a_lower_threshold(made, site):
    Cohort("run", made.cohort.names, 2)


def a_letter_held_back(made, site):
    made.mask("site0")
    site.unmask(LABEL, made.cohort.names, {})


def too_large_a_number(made, site):
    made.mask("site0", added=2.0**21)


def not_a_number(made, site):
    made.mask("site0", added=np.nan)


ATTACKS = {
    swapped_greeting: "not signed by it", a_greeting_missing: "not those of the cohort", too_few_greetings: "fewer than the 4",
    a_greeting_of_another_run: "not signed by it",
    two_lists_of_survivors: "unmasked before, for another list of survivors", both_kinds: "than the one it was repaired for",
    both_kinds_in_two_submissions: "work/0/3/0 was unmasked before",
    unmasked_without_repair: "than the one it was repaired for",
    lists_that_are_not_parts_of_each_other: "without some of these survivors",
    repaired_with_nobody_lost: "nothing to repair", two_questions: "another question",
    another_submission_with_fewer: "work/0/3/0 was unmasked before", two_cohorts_for_one_label: "another question",
    shares_of_an_earlier_sum: "not what this site has masked last", strangers_take_part: "not sites that have met",
    too_few_take_part: "fewer than the 4", all_but_one_are_gone: "nothing is unmasked",
    all_but_one_are_gone_and_nothing_repaired: "nothing is unmasked", left_out_of_its_own_list: "this site among them",
    unmask_before_masking: "not what this site has masked last", a_lower_threshold: "will not do",
    a_letter_held_back: "is missing", too_large_a_number: "beyond", not_a_number: "NaN",
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_attacks_are_refused(attack):
    made = Federation()
    with pytest.raises((Insecure, OutOfRange), match=ATTACKS[attack]):
        attack(made, made.sites["site0"])


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("bit", [0, 0x80], ids=["copied", "written differently"])
def test_a_site_that_passes_off_anothers_key_as_its_own(count, bit):
    """Sites that work with the coordinator sign the keys of the honest ones.  An honest site that lies between a key's two
    owners would add its mask with one and take that with the other away: its numbers would come out in the clear.  The highest
    bit of a key does not count, so copies need not look alike."""
    made = Federation(count)
    names = made.cohort.names
    victim, copies = names[count // 2], dict(zip(names[: count // 2], names[count // 2 + 1 :], strict=True))
    keys = {hello.name: hello.key for hello in made.hellos}
    hellos = []
    for hello in made.hellos:
        key = keys[copies.get(hello.name, hello.name)]
        key = key[:-1] + bytes([key[-1] ^ (bit if hello.name in copies else 0)])
        signature = made.certificates[hello.name].sign(secure.greeting(made.cohort, hello.name, key))
        hellos.append(hello._replace(key=key, signature=signature))
    site = made.site(victim)
    site.meet(hellos)
    words = np.zeros(1000, np.uint64)
    about = site.mask(LABEL, names, words).words - (0 if made.cohort.complete else own_mask(site, words.size))
    assert uniform([about]) > 1e-4


def own_mask(site, size):
    """What the shares of a site's seed take away from its numbers, as all others can once it counts."""
    drawn = [site._drawn(LABEL, site.name, other) for other in site.cohort.after(site.name)]
    seed = secure._combined(site._weights[0], drawn[: site.cohort.threshold])
    return secure._own_stream(site.cohort, LABEL, site.name, seed, size)


def test_a_greeting_is_no_text_that_a_server_can_have_signed():
    """NVFlare has a site sign its name and a text of the server's choice with the same key."""
    made = Federation()
    with pytest.raises(UnicodeDecodeError, match="byte 0xff in position 0"):
        secure.greeting(made.cohort, "site0", made.hellos[0].key).decode()


def test_two_processes_of_a_site_answer_as_one(tmp_path):
    """A coordinator may start a job twice: the two workers at a site know what the other one has answered."""
    made = Federation(7)
    names = made.cohort.names
    first, second = (made.site("site0", answered=Answered(tmp_path / "answered")) for _ in range(2))
    for site in (first, second):
        site.meet(made.hellos)
    words, other = np.zeros(1, np.uint64), np.ones(1, np.uint64)
    first.mask(LABEL, names, words)
    with pytest.raises(Insecure, match="another question"):
        second.mask(LABEL, names, other)
    second.mask(LABEL, names, words)
    first.repair(LABEL, names[:-1])
    with pytest.raises(Insecure, match="without some of these survivors"):
        second.repair(LABEL, (*names[:-2], names[-1]))
    with pytest.raises(Insecure, match="than the one it was repaired for"):
        second.unmask(LABEL, names, {})


@pytest.mark.parametrize("what", ["share", "letter"])
def test_a_wrong_share_or_a_changed_letter_ends_the_round(what):
    made = Federation()
    masked = {name: made.mask(name) for name in made.cohort.names}
    if what == "letter":
        (sender, *_) = made.letters(masked, "site0")
        masked[sender] = masked[sender]._replace(letters=tuple(letter + 1 for letter in masked[sender].letters))
    shares = {name: made.unmask(name, masked) for name in made.cohort.names}
    if what == "share":
        shares["site0"]["site3"] += 1
    with pytest.raises(Insecure, match="a site gave a wrong one"):
        recovered(made.cohort, LABEL, masked, [], shares)


def test_too_few_shares_give_no_sum():
    made = Federation()
    masked = {name: made.mask(name) for name in made.cohort.names}
    few = {name: made.unmask(name, masked) for name in made.cohort.names[: made.cohort.threshold - 1]}
    with pytest.raises(Insecure, match="the round has no sum"):
        recovered(made.cohort, LABEL, masked, [], few)


def test_lists_that_differ_from_site_to_site_give_nothing():
    """Nine sites of which six are needed.  If the survivors' repairs could be told apart, three lists of six would give the sum
    over the first three sites: each of them is left out by three others, and six give shares of its seed."""
    made = Federation(9)
    names = made.cohort.names
    first, second, third = names[:3], names[3:6], names[6:]
    lists = (
        dict.fromkeys(first, first + second)
        | dict.fromkeys(second, second + third)
        | dict.fromkeys(third, first + third)
    )
    masked = {name: made.mask(name) for name in names}
    repairs = {name: made.sites[name].repair(LABEL, lists[name]) for name in names}
    shares = {name: made.unmask(name, masked, lists[name]) for name in names}
    total = sum(masked[name].words for name in first)
    for name in first:
        givers = [giver for giver in names if name in shares[giver]]
        (weights,) = lagrange([made.cohort.places[giver] for giver in givers], [0])
        seed = sum(weight * shares[giver][name] for weight, giver in zip(weights, givers, strict=True)) % PRIME
        assert len(givers) == made.cohort.threshold
        assert secure._digest(made.cohort, LABEL, name, seed) == masked[name].seed
        total = total - secure._own_stream(made.cohort, LABEL, name, seed, total.size)
    wanted = sum(made.values[name] for name in first)
    for taken in ([], first, second, first + second, names):
        found = WIDE.decode(total + sum((repairs[name] for name in taken), np.zeros(total.size, np.uint64)))
        assert np.abs(found - wanted).min() > 1e-3
    honest = Federation(9)
    agreed = honest.total(names, first + second)
    np.testing.assert_allclose(agreed, sum(made.values[name] for name in first + second))


@pytest.mark.parametrize("count", range(3, 12))
def test_the_usual_threshold_stands_a_lying_coordinator_with_fewer_than_a_third_of_the_sites(count):
    """Two lists without a site in common, or a site's shares after the others repaired without it, would need more honest sites
    than there are."""
    cohort = Cohort.usual("run", [f"{number:02d}" for number in range(count)])
    for liars in range(-(-count // 3)):
        assert 2 * (cohort.threshold - liars) > count - liars


@pytest.mark.parametrize("count", [4, 10, 30, 100])
def test_what_travels_for_ten_thousand_numbers_in_single_precision(count):
    """Less than 1.3 times the plain message and reply, down and up together; `test_secure_runs` counts such bytes in a run."""
    cohort, size = Cohort.usual("run", [f"{number:03d}" for number in range(count)]), 10_000
    others = [[cohort.letter(sender, name) for sender in cohort.names] for name in cohort.names]
    letters = {len(names) - names.count(None) for names in others}
    assert letters == {count - cohort.threshold}, "every site gets as many letters as it sends"
    masked, seed, share, rolls = 6 * (size + 2), 16, 16, 2 * count
    down = 4 * size + 16 * letters.pop() + rolls
    up = masked + seed + 16 * (count - cohort.threshold) + share * count
    assert (down + up) / (8 * size) < 1.3


def uniform(messages):
    """The p-value of the bytes of captured messages under uniform bytes."""
    counts = np.bincount(np.frombuffer(b"".join(words.tobytes() for words in messages), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return chi2.sf(((counts - expected) ** 2 / expected).sum(), 255)


@pytest.mark.parametrize("count", [3, 4])
def test_single_replies_look_uniform_and_the_test_can_fail(monkeypatch, count):
    def captured():
        made = Federation(count, size=2000)
        return [made.mask(name).words for name in made.cohort.names]

    assert uniform(captured()) > 1e-4  # masks follow from fixed secrets: the same every time
    monkeypatch.setattr(secure, "_stream", lambda key, size: np.zeros(size, np.uint64))
    assert uniform(captured()) < 1e-12


def test_repairs_and_letters_look_uniform(monkeypatch):
    def captured():
        made = Federation(4, size=2000)
        masked = {name: made.mask(name) for name in made.cohort.names}
        return [made.sites[name].repair(LABEL, made.cohort.names[:3]) for name in made.cohort.names[:3]], masked

    repairs, _ = captured()
    assert uniform(repairs) > 1e-4
    made = Federation(10, size=1)
    letters = [
        letter.to_bytes(16, "big")[1:]  # the first byte has seven bits
        for label in range(100)
        for name in made.cohort.names
        for letter in made.mask(name, label=str(label)).letters
    ]
    assert uniform([np.frombuffer(b"".join(letters), np.uint8)]) > 1e-4
    monkeypatch.setattr(secure, "_stream", lambda key, size: np.zeros(size, np.uint64))
    assert uniform(captured()[0]) < 1e-12
