"""What secure sums cost: one sum in one process by sites and numbers, and a round over three real sites with and without.

    python benchmarks/secure.py              # the sums; tables for docs/secure-sums.md on standard output
    python benchmarks/secure.py --rounds     # a server and three sites on this machine, runs with and without in turn

Processor seconds of a site are the mean over all sites of advertising, masking (all adverts verified) and unmasking; those of
the coordinator are of taking the masks away, with nobody lost and with a tenth of the sites lost after they had advertised.
Replies are in single precision.  benchmarks/flower.py has the same of Flower's SecAgg+.
"""

import argparse
import json
import statistics
import sys
import time

import harness
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbilevel.engines.fixed import NARROW, WIDE, to_words
from fedbilevel.federation.protocol.secure import Cohort, SecureSite, recovered
from fedbilevel.federation.protocol.sums import ADVERT, LETTER, SHARE

SITES, SIZES = (3, 10, 30, 100), (20, 10_000, 1_000_000)
MOST = 30_000_000
"""Numbers of all sites together, unless told otherwise: beyond that the machine has not the memory."""


class Key:
    certificate = b""

    def __init__(self, keys, name):
        self.keys, self.sign = keys, keys[name].sign

    def verify(self, name, certificate, message, signature):
        self.keys[name].public_key().verify(signature, message)


def one_sum(count: int, size: int, lost: int) -> dict:
    names = [f"{number:03d}" for number in range(count)]
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    cohort = Cohort.usual("bench", names)
    sites = [SecureSite(name, cohort, name.encode().ljust(32), Key(keys, name)) for name in names]
    hellos = [site.hello() for site in sites]
    for site in sites:
        site.meet(hellos)
    values = np.random.default_rng(0).normal(size=(count, size)).astype(np.float32)
    watch = [time.process_time()]
    adverts = [] if cohort.complete else [site.advertise("0") for site in sites]
    watch.append(time.process_time())
    alive, share = sites[: count - lost], 2.0 ** -np.ceil(np.log2(count))
    masked = {}
    for site, row in zip(alive, values, strict=False):
        masked[site.name] = NARROW.pack(site.mask("0", adverts, to_words([row], share, NARROW)))
    watch.append(time.process_time())
    shares = {} if cohort.complete else {site.name: site.unmask("0", adverts, sorted(masked)) for site in alive}
    watch.append(time.process_time())
    words = {name: NARROW.unpack(packed) for name, packed in masked.items()}
    *total, mass = NARROW.decode(recovered(cohort, "0", adverts, words, shares))
    watch.append(time.process_time())
    advertise, mask, unmask, recover = np.diff(watch)
    mean = values[: len(alive)].mean(axis=0, dtype=np.float64)
    return {
        "site": (advertise / count + (mask + unmask) / len(alive)),
        "coordinator": recover,
        "error": float(np.abs(np.array(total) / mass - mean).max()),
    }


def bytes_of(count: int, size: int, width: int) -> tuple[int, int]:
    """Down and up a site and sum, beside ``width`` bytes a number without secure sums."""
    ring = (NARROW if width == 4 else WIDE).width // 8
    down, up = width * size, ring * (size + 2)
    if count > 3:
        down, up = down + count * (ADVERT + LETTER), up + ADVERT + (count - 1) * LETTER + count * SHARE
    return down, up


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sites", type=int, default=3, help="of --rounds")
    parser.add_argument("--most", type=int, default=MOST, help="numbers of all sites together")
    options = parser.parse_args()
    if options.rounds:
        import federation

        sites = [f"site-{number}" for number in range(1, options.sites + 1)]
        kinds = {"single replies": False, "secure sums": True}
        say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        measured = federation.collect(options.repeats, say, kinds, sites, idle=False)["rounds"]
        told = {
            name: {
                stage: statistics.median(seconds for run in runs for seconds in run[stage])
                for stage in ("bilevel", "model")
            }
            | {each: runs[0][each] for each in ("bytes_up", "bytes_down")}
            for name, runs in measured.items()
        }
        told["ratio"] = {
            stage: told["secure sums"][stage] / told["single replies"][stage] for stage in ("bilevel", "model")
        }
    else:
        told = {}
        for count in SITES:
            for size in SIZES:
                if count * size > options.most:
                    continue
                kept = [one_sum(count, size, 0) for _ in range(options.repeats)]
                lossy = one_sum(count, size, count // 10) if count >= 10 else None
                traffic = [sum(bytes_of(count, size, width)) / (2 * width * size) for width in (4, 8)]
                told[f"{count} sites, {size} numbers"] = row = {
                    "site_ms": 1e3 * statistics.median(each["site"] for each in kept),
                    "coordinator_ms": 1e3 * statistics.median(each["coordinator"] for each in kept),
                    "coordinator_lossy_ms": None if lossy is None else 1e3 * lossy["coordinator"],
                    "error": max(each["error"] for each in kept), "traffic_32": traffic[0], "traffic_64": traffic[1],
                }  # fmt: skip
                shown = (f"{value:.3g}" if value is not None else "" for value in row.values())
                print(f"| {count} | {size:,} | " + " | ".join(shown) + " |", flush=True)
    which = f"-{options.sites}" if options.sites != 3 else ""
    harness.save(f"secure-rounds{which}" if options.rounds else "secure", options.repeats, told)
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
