"""What secure sums cost: one sum in one process by sites and numbers, and a round over three real sites with and without.

    python benchmarks/secure.py              # the sums
    python benchmarks/secure.py --rounds     # a server and three sites on this machine, runs with and without in turn

Processor seconds of a site are the mean over all sites of masking and unmasking, and where sites are lost of repairing; those
of the coordinator are of handing letters on and taking the masks away, with nobody lost and with a tenth of the sites lost
before they masked.  Replies are in single precision.  Bytes are counted by a coordinator and sites that talk to each other.
benchmarks/flower.py has the same of Flower's SecAgg+.  docs/results/secure-sums.md is made from what is stored.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import harness
import numpy as np
import pandas as pd
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedbilevel.engines.fixed import NARROW, WIDE, Fixed, to_words
from fedbilevel.federation.protocol.settings import JobSettings
from fedbilevel.federation.protocol.sums import Masking, Sums

SITES, SIZES = (3, 10, 30, 100), (20, 10_000, 1_000_000)
MOST = 30_000_000
"""Numbers of all sites together, unless told otherwise: beyond that the machine has not the memory."""


class Key:
    certificate = b""

    def __init__(self, keys, name):
        self.keys, self.sign = keys, keys[name].sign

    def verify(self, name, certificate, message, signature):
        self.keys[name].public_key().verify(signature, message)


class Reply:
    def __init__(self, content: dict) -> None:
        self.content = content


class Sites:
    """All sites of a run in this process: what a coordinator asks through, with processor seconds a task."""

    def __init__(self, count: int, folder: Path) -> None:
        names = tuple(f"{number:03d}" for number in range(count))
        keys = {name: Ed25519PrivateKey.generate() for name in names}
        self.settings = JobSettings("bench", "fair", names, secure=True)
        for name in names:
            (folder / name).mkdir()
        self.masking = {name: Masking(name, self.settings, Key(keys, name), folder / name) for name in names}
        self.spent: dict[str, float] = {}

    def timed(self, task: str, ask):
        began = time.process_time()
        told = ask()
        self.spent[task] = self.spent.get(task, 0.0) + time.process_time() - began
        return told

    def ask_all(self, task: str, request: dict) -> dict:
        return self.ask_each(task, dict.fromkeys(self.masking, request))

    def ask_each(self, task: str, requests: dict, seconds: float = 0.0) -> dict:
        return {
            name: Reply(self.timed(task, partial(getattr(self.masking[name], task), request)))
            for name, request in requests.items()
        }

    def here(self) -> list:
        return list(self.masking)

    def enough(self, sites: list, what: str) -> None:
        if len(sites) < self.settings.needed:
            raise RuntimeError(what)


def masked(masking: Masking, request: dict, row: np.ndarray, share: float, ring: Fixed) -> list[np.ndarray]:
    return masking.mask(request, request["exchange"], to_words([row], share, ring), ring)


def one_sum(count: int, size: int, lost: int, ring: Fixed = NARROW) -> dict:
    with tempfile.TemporaryDirectory() as name:
        sites = Sites(count, Path(name))
        sums = Sums(sites.settings, sites, 1)
        sums.meet()
        kind = np.float32 if ring is NARROW else np.float64
        values = np.random.default_rng(0).normal(size=(count, size)).astype(kind)
        share = 2.0 ** -np.ceil(np.log2(count))
        for exchange in ("work/0/0/0", "work/0/1/0"):  # the first sum makes what is made once a run
            enclosed = sums.enclosed({site: {} for site in sites.masking}, exchange)
            sites.spent.clear()
            packed = {
                site: sites.timed("mask", partial(masked, sites.masking[site], enclosed[site], row, share, ring))
                for site, row in list(zip(enclosed, values, strict=True))[: count - lost]
            }
            began, asked = time.process_time(), sites.spent["mask"]
            *total, mass = ring.decode(sums.total(packed, ring))
            whole = time.process_time() - began
        at_sites = sum(sites.spent.values())
        mean = values[: len(packed)].mean(axis=0, dtype=np.float64)
        extra = [np.mean([sums.costs[site][way] for site in packed]) for way in (0, 1)]
        reply = np.mean([sum(array.nbytes for array in arrays) for arrays in packed.values()])
        plain = 2 * values.itemsize * size
        return {
            "site": at_sites / len(packed),
            "coordinator": whole - (at_sites - asked),
            "error": float(np.abs(np.array(total) / mass - mean).max()),
            "traffic": float(values.itemsize * size + extra[0] + reply + extra[1]) / plain,
        }


def exponent(told: dict, size: int, what: str) -> float:
    """p of the fit ``c sites^p`` to what sums of so many numbers take, from ten sites on."""
    rows = {count: told.get(f"{count} sites, {size} numbers") for count in SITES if count >= 10}
    points = [(count, row[what]) for count, row in rows.items() if row is not None]
    return float(np.polyfit(*np.log(np.array(points)).T, 1)[0])


def stored() -> list[tuple[int, int, dict]]:
    """(sites, numbers, what one sum took)."""
    told = harness.load("secure")["measured"]
    return [
        (count, size, told[name])
        for count in SITES
        for size in SIZES
        if (name := f"{count} sites, {size} numbers") in told
    ]


def shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def milliseconds(value: float | None) -> str:
    """Two digits: 0.57, 14, 243."""
    return shown(value, ".2g" if value is not None and value < 99 else ",.0f")


def sums_table() -> str:
    heads = ["sites", "numbers", "a site, ms", "coordinator, ms", "lost: a site, ms", "lost: coordinator, ms", "error",
             "traffic, 32-bit replies", "64-bit", "lost, 32-bit"]  # fmt: skip
    times = ("site_ms", "coordinator_ms", "site_lossy_ms", "coordinator_lossy_ms")
    traffic = ("traffic_32", "traffic_64", "traffic_lossy_32")
    lines = [
        [f"{count}", f"{size:,}", *(milliseconds(row[name]) for name in times), f"{row['error']:.0e}",
         *(shown(row[name], ".2f") for name in traffic)]
        for count, size, row in stored()
    ]  # fmt: skip
    return harness.markdown(heads, lines)


def rounds_table() -> str:
    told = harness.load("secure-rounds")["measured"]
    lines = [
        [name, *(f"{told[name][stage]:.3f} s" for stage in ("bilevel", "model")),
         *(f"{told[name][way]}" for way in ("bytes_up", "bytes_down"))]
        for name in ("single replies", "secure sums")
    ]  # fmt: skip
    lines.append(["ratio", *(f"{told['ratio'][stage]:.2f}" for stage in ("bilevel", "model")), "", ""])
    return harness.markdown(["replies", "FedBiOAcc, a round", "FedAvg, a round", "bytes up", "bytes down"], lines)


def flower_table() -> str:
    """What benchmarks/flower.py printed, beside ours."""
    ours = {(count, size): row for count, size, row in stored()}
    lines = []
    for row in pd.read_csv(harness.RESULTS / "flower.csv").to_dict("records"):
        own = ours[row["sites"], row["numbers"]]
        lines.append(
            [f"{row['sites']:.0f}", f"{row['numbers']:,.0f}", f"{row['client_ms']:,.0f}", milliseconds(own["site_ms"]),
             f"{row['coordinator_ms']:,.0f}", milliseconds(own["coordinator_ms"]), f"{row['error']:.0e}", f"{own['error']:.0e}"]
        )  # fmt: skip
    heads = [
        "sites",
        "numbers",
        "Flower, a client, ms",
        "ours",
        "Flower, coordinator, ms",
        "ours",
        "Flower, error",
        "ours",
    ]
    return harness.markdown(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sites", type=int, default=3, help="of --rounds")
    parser.add_argument("--most", type=int, default=MOST, help="numbers of all sites together")
    parser.add_argument("--counts", help="only sums of so many sites, beside the stored ones: 30,100")
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
        counts = [int(count) for count in options.counts.split(",")] if options.counts else SITES
        told = {} if counts is SITES else harness.load("secure")["measured"]
        for count in counts:
            for size in SIZES:
                if count * size > options.most:
                    continue
                kept = [one_sum(count, size, 0) for _ in range(options.repeats)]
                wide = one_sum(count, size, 0, WIDE)
                lossy = one_sum(count, size, count // 10) if count >= 10 else None
                told[f"{count} sites, {size} numbers"] = row = {
                    "site_ms": 1e3 * statistics.median(each["site"] for each in kept),
                    "coordinator_ms": 1e3 * statistics.median(each["coordinator"] for each in kept),
                    "site_lossy_ms": None if lossy is None else 1e3 * lossy["site"],
                    "coordinator_lossy_ms": None if lossy is None else 1e3 * lossy["coordinator"],
                    "error": max(each["error"] for each in kept), "traffic_32": kept[0]["traffic"],
                    "traffic_64": wide["traffic"], "traffic_lossy_32": None if lossy is None else lossy["traffic"],
                }  # fmt: skip
                shown = (f"{value:.3g}" if value is not None else "" for value in row.values())
                print(f"| {count} | {size:,} | " + " | ".join(shown) + " |", flush=True)
        told["exponent"] = {
            f"{what}, {size} numbers": exponent(told, size, f"{what}_ms")
            for what in ("site", "coordinator")
            for size in SIZES[:2]
        }
    which = f"-{options.sites}" if options.sites != 3 else ""
    harness.save(f"secure-rounds{which}" if options.rounds else "secure", options.repeats, told)
    harness.write_pages()
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
