"""The skeleton runs, equals a naive loop, and once installed stands among the methods of bench, table1 and fit."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import fedbilevel as fb
from fedbilevel import plugins
from fedbilevel.tasks import random_quadratic

SKELETON = Path(__file__).parents[1] / "examples" / "skeleton"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for sys.path with the package as an installer leaves it: its module, and its metadata."""
    home = tmp_path_factory.mktemp("site-packages")
    project = tomllib.loads((SKELETON / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = home / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (about / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    (home / "heavyball.py").write_bytes((SKELETON / "heavyball.py").read_bytes())
    return home


def test_the_skeleton_equals_a_naive_loop(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    from heavyball import heavyball

    clients = random_quadratic(2, clients=3)
    gamma, eta, beta, rounds, steps = 0.4, 0.05, 0.5, 6, 3
    algorithm = heavyball(clients.problem(), fb.exact(), gamma, eta, momentum=beta, local_steps=steps)
    result = fb.simulate(algorithm, clients.data(), rounds, record_every=None)

    x, velocity = np.array(clients.outer, float), np.zeros_like(clients.outer, float)
    ys = np.tile(np.asarray(clients.inner, float), (3, 1))
    for _ in range(rounds):
        xs = np.tile(x, (3, 1))
        for _ in range(steps):
            for m in range(3):
                hessian, cross = np.asarray(clients.inner_hessian[m]), np.asarray(clients.inner_cross[m])
                point = np.concatenate([xs[m], ys[m]])
                slope = np.asarray(clients.outer_hessian[m]) @ point - np.asarray(clients.outer_linear[m])
                in_x, in_y = slope[: len(x)], slope[len(x) :]
                inner = hessian @ ys[m] - cross @ xs[m] - np.asarray(clients.inner_offset[m])
                xs[m] = xs[m] - eta * (in_x + cross.T @ np.linalg.solve(hessian, in_y))
                ys[m] = ys[m] - gamma * inner
        velocity = beta * velocity + xs.mean(axis=0) - x
        x = x + velocity
    np.testing.assert_allclose(result.outer, x, rtol=1e-4, atol=1e-5)


def run(installed, where, *arguments):
    path = os.pathsep.join([str(installed), *sys.path])
    program = "from fedbilevel.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=where, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_commands_take_it(installed, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("north", "south"):
        table = pd.DataFrame({"a": rng.normal(size=120), "b": rng.normal(size=120), "sex": rng.choice(["f", "m"], 120)})
        table["y"] = np.where(table["a"] + rng.normal(size=120) > 0, "yes", "no")
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    fit = "fit north.csv south.csv --target y --positive yes --sensitive sex --steps 20 --weight-steps 10 --compare-with none"
    bench = "bench --tasks quadratic --algorithms heavyball --seeds 2 --budget 1 --rounds 20"
    table1 = "table1 --datasets credit --distributions iid --methods heavyball --seeds 2 --steps 20 --contrast 0"
    wanted = {"fit": f"{fit} --method heavyball", "bench": bench, "table1": table1}
    for name, line in wanted.items():
        run(installed, tmp_path, *line.split(), "--out", f"runs/{name}", "--quiet")
        methods = pd.read_csv(tmp_path / "runs" / name / "rows.csv")["method"]
        assert methods.str.contains("heavyball").all(), methods


@pytest.mark.parametrize(
    ("value", "sentence"),
    [("nosuchmodule:method", "cannot be loaded: No module named"), ("json:loads", "is not decorated with")],
)
def test_what_cannot_be_used_is_left_out_with_a_warning(monkeypatch, value, sentence):
    plugins.plugins.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", lambda group: [EntryPoint("broken", value, group)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert plugins.plugins() == {}
    plugins.plugins.cache_clear()
    assert sentence in str(caught[0].message)
