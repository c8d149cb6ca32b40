"""A network inside: memory and time of gradient-only and second-order methods at 1e4, 1e6 and 1e7 inner parameters.

    python benchmarks/networks.py [--torch PYTHON] [--repeats 3]

Two clients with 256 rows of 64 columns from ten sources.  The inner variable is a network with two hidden layers, the outer
one the logits of the ten sources' weights.  Every measurement is a fresh process on one core.  Before anything is timed, F2SA
and the Neumann series of both implementations take five steps on whole sets in float64 and must agree to 1e-10.  ``--torch``
names a Python with PyTorch and NumPy, where it is not this one.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

WIDTHS = {10_000: 70, 1_000_000: 963, 10_000_000: 3125}
COLUMNS, CLASSES, SOURCES, CLIENTS, ROWS, BATCH = 64, 10, 10, 2, 256, 8
INNER_STEP, OUTER_STEP, RIDGE, TERMS, PENALTY = 0.1, 1.0, 0.01, 10, 5.0
METHODS = ("f2sa", "pbgd", "bome", "meha", "neumann", "conjugate_gradient")
EAGER = ("f2sa", "neumann")
STEPS = {10_000: 200, 1_000_000: 10, 10_000_000: 2}
MEMORY = 4096.0


def drawn(size, precision):
    """Rows and a first network from a seed."""
    generator, width = np.random.default_rng(0), WIDTHS[size]
    rows = generator.normal(size=(2, CLIENTS, ROWS, COLUMNS)).astype(precision)
    labels = np.argmax(rows @ generator.normal(size=(COLUMNS, CLASSES)), axis=-1).astype(np.int32)
    sources = generator.integers(0, SOURCES, size=(2, CLIENTS, ROWS)).astype(np.int32)
    sizes = (COLUMNS, width, width, CLASSES)
    layers = [(generator.normal(size=(a, b)) / a**0.5).astype(precision) for a, b in pairwise(sizes)]
    return rows, labels, sources, layers


def ours(method, size, steps, whole):
    import jax
    import jax.numpy as jnp

    import fedbilevel as fb

    precision = np.float64 if whole else np.float32
    jax.config.update("jax_enable_x64", whole)
    rows, labels, sources, layers = drawn(size, precision)

    def losses(y, batch):
        hidden = batch["a"]
        for layer in y[:-1]:
            hidden = jnp.tanh(hidden @ layer)
        logits = hidden @ y[-1]
        return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, batch["b"][:, None], axis=1)[:, 0]

    def inner(x, y, batch):
        weights = SOURCES * jax.nn.softmax(x)[batch["s"]]
        return jnp.mean(weights * losses(y, batch)) + 0.5 * RIDGE * sum(jnp.sum(layer**2) for layer in y)

    def start(key):
        """Drawn by the program itself but where the two implementations are compared: large constants compile slowly."""
        if whole:
            return [jnp.asarray(layer) for layer in layers]
        return [jax.random.normal(key, layer.shape, jnp.float32) / layer.shape[0] ** 0.5 for layer in layers]

    problem = fb.BilevelProblem(
        inner, lambda x, y, batch: jnp.mean(losses(y, batch)), lambda key: (jnp.zeros(SOURCES, precision), start(key))
    )
    parts = [{"a": rows[i], "b": labels[i], "s": sources[i]} for i in (0, 1)]
    options = {"inner_step": INNER_STEP, "outer_step": OUTER_STEP, "local_steps": 1}
    options["batch_size"] = None if whole else BATCH
    if method == "neumann":
        algorithm = fb.fedbio(problem, fb.neumann(TERMS, INNER_STEP), **options)
    elif method == "conjugate_gradient":
        algorithm = fb.fedbio(problem, fb.conjugate_gradient(TERMS, 1e-6), **options)
    else:
        fixed = {"f2sa": {"penalty": PENALTY, "increase": 0.0}}.get(method, {})
        algorithm = getattr(fb, method)(problem, inner_steps=1, **fixed, **options)
    run = {"record_every": None, "devices": jax.devices()[:1]}
    data = fb.ClientData(*parts)
    began = time.perf_counter()
    fb.simulate(algorithm, data, 1, **run)
    compiled = time.perf_counter()
    found = fb.simulate(algorithm, data, steps, **run)
    seconds = time.perf_counter() - compiled
    return np.asarray(found.outer), seconds / steps, compiled - began


def eager(method, size, steps, whole):
    import torch
    import torch.nn.functional as F
    from torch.autograd import grad

    torch.set_num_threads(1)
    torch.manual_seed(0)
    precision = np.float64 if whole else np.float32
    rows, labels, sources, layers = drawn(size, precision)
    leaves = [torch.from_numpy(part) for part in (rows, labels.astype(np.int64), sources.astype(np.int64))]
    parts = [[tuple(leaf[i, m] for leaf in leaves) for i in (0, 1)] for m in range(CLIENTS)]

    def losses(y, batch):
        hidden = batch[0]
        for layer in y[:-1]:
            hidden = torch.tanh(hidden @ layer)
        return F.cross_entropy(hidden @ y[-1], batch[1], reduction="none")

    def inner(x, y, batch):
        weights = SOURCES * torch.softmax(x, 0)[batch[2]]
        return (weights * losses(y, batch)).mean() + 0.5 * RIDGE * sum((layer**2).sum() for layer in y)

    def outer(y, batch):
        return losses(y, batch).mean()

    def pick(rows):
        if whole:
            return rows
        index = torch.randint(ROWS, (BATCH,))
        return tuple(part[index] for part in rows)

    def free(tensors):
        return [tensor.detach().requires_grad_() for tensor in tensors]

    def moved(y, rate, along):
        return [value.detach() - rate * step for value, step in zip(y, along, strict=True)]

    def f2sa(x, y, z, train, val):
        batch, y, z = pick(train), free(y), free(z)
        pull = grad(outer(y, pick(val)) + PENALTY * inner(x, y, batch), y)
        y, z = moved(y, INNER_STEP / (1 + PENALTY), pull), moved(z, INNER_STEP, grad(inner(x, z, batch), z))
        x, batch = x.detach().requires_grad_(), pick(train)
        along = grad(PENALTY * (inner(x, y, batch) - inner(x, z, batch)), x)[0]
        return x.detach() - OUTER_STEP * along, y, z

    def neumann(x, y, z, train, val):
        (x,), y = free([x]), free(y)
        slope = grad(inner(x, y, pick(train)), y)
        term = list(grad(outer(y, pick(val)), y))
        total = [part.clone() for part in term]
        for _ in range(TERMS):
            image = grad(grad(inner(x, y, pick(train)), y, create_graph=True), y, grad_outputs=term)
            term = [a - INNER_STEP * b for a, b in zip(term, image, strict=True)]
            total = [a + b for a, b in zip(total, term, strict=True)]
        mixed = grad(inner(x, y, pick(train)), y, create_graph=True)
        along = -INNER_STEP * grad(mixed, x, grad_outputs=total)[0]
        return x.detach() - OUTER_STEP * along, moved(y, INNER_STEP, slope), z

    first = [torch.from_numpy(layer) for layer in layers]
    x, inside = torch.from_numpy(np.zeros(SOURCES, precision)), [(first, first) for _ in parts]
    step = {"f2sa": f2sa, "neumann": neumann}[method]
    began = time.perf_counter()
    for _ in range(steps):
        ends = [step(x, *own, train, val) for own, (train, val) in zip(inside, parts, strict=True)]
        x, inside = torch.stack([end[0] for end in ends]).mean(0), [end[1:] for end in ends]
    return x.numpy(), (time.perf_counter() - began) / steps, 0.0


def measure(job, python=sys.executable):
    """One job in a fresh process on one core."""
    environment = {
        **os.environ,
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "JAX_PLATFORMS": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    command = [python, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise RuntimeError(f"the measurement {job} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def child(job):
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    run = {"ours": ours, "eager": eager}[job["by"]]
    outer, seconds, compiled = run(job["method"], job["size"], job["steps"], job["whole"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": seconds, "compile": compiled, "peak": peak, "outer": outer.tolist()}))


def agree(python):
    for method in EAGER:
        job = {"method": method, "size": 10_000, "steps": 5, "whole": True}
        found = [
            measure({**job, "by": by}, python if by == "eager" else sys.executable)["outer"] for by in ("ours", "eager")
        ]
        gap = np.abs(np.subtract(*found)).max()
        if not gap < 1e-10:
            raise SystemExit(f"{method}: the two implementations differ by {gap}; nothing is timed.")


def shown():
    """The table, and what was asked."""
    from harness import describe, digits, load

    record = load("networks")
    found = record["measured"]
    lines = ["| one step of two clients | " + " | ".join(f"{size:,}: ms | MB" for size in WIDTHS) + " |"]
    lines.append("| --- |" + " ---: | ---: |" * len(WIDTHS))
    names = {"neumann": f"FedBiO, series of {TERMS}", "conjugate_gradient": f"FedBiO, {TERMS} conjugate gradients"}
    for by in ("ours", "eager"):
        for method in METHODS if by == "ours" else EAGER:
            title = f"{names.get(method, method.upper())}{', eager PyTorch' if by == 'eager' else ''}"
            cells = [found[f"{by}/{method}/{size}"] for size in WIDTHS]
            lines.append(f"| {title} | " + " | ".join(f"{digits(c['ms'])} | {c['peak']:.0f}" for c in cells) + " |")
    peak = max(found[f"ours/{method}/{10_000_000}"]["peak"] for method in METHODS)
    verdict = "met" if peak < MEMORY else "**missed**"
    lines += [
        "",
        f"Milliseconds and peak memory of the process, one core, batch {BATCH}, K = 1, without compiling.",
        "",
        f"- ten million parameters, largest peak of ours, MB: **{peak:.0f}** (target: below {MEMORY:.0f}; {verdict})",
        "",
        describe(record),
    ]
    return "\n".join(lines)


def main():
    sys.path.insert(0, str(Path(__file__).parent))
    import statistics

    from harness import save, write_pages

    asked = argparse.ArgumentParser()
    asked.add_argument("--job")
    asked.add_argument("--torch", default=sys.executable)
    asked.add_argument("--repeats", type=int, default=3)
    given = asked.parse_args()
    if given.job:
        child(json.loads(given.job))
        return
    agree(given.torch)
    runs = {}
    for number in range(given.repeats):
        for size in WIDTHS:
            for by in ("ours", "eager"):
                for method in METHODS if by == "ours" else EAGER:
                    job = {"by": by, "method": method, "size": size, "steps": STEPS[size], "whole": False}
                    result = measure(job, given.torch if by == "eager" else sys.executable)
                    runs.setdefault(f"{by}/{method}/{size}", []).append(result)
                    print(
                        f"[{number + 1}] {by} {method} {size}: {1e3 * result['seconds']:.3g} ms, {result['peak']:.0f} MB",
                        flush=True,
                    )
    middle = lambda results, name: statistics.median(result[name] for result in results)  # noqa: E731
    found = {
        name: {
            "ms": 1e3 * middle(results, "seconds"),
            "peak": middle(results, "peak"),
            "compile": middle(results, "compile"),
        }
        for name, results in runs.items()
    }
    save("networks", given.repeats, found)
    write_pages()


if __name__ == "__main__":
    main()
