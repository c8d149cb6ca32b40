"""Programs the tests name as "module:function", as a researcher would: quadratic clients in float64 or float32."""

import time
from functools import partial
from pathlib import Path

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.federation.protocol.program import ArrayProgram, Stage
from fedbilevel.tasks import quadratic

CLIENTS, SAMPLES, OUTER, INNER = 3, 12, 4, 5
FUNCTION = "tests.federation.programs:program"
SEVERAL = "tests.federation.programs:Several"
SPOILT = "tests.federation.programs:Spoilt"
HELD = "tests.federation.programs:held"


def clients(seed=0):
    """Every client's samples: (train leaves, val leaves), leading axis the clients."""
    rng = np.random.default_rng(seed)

    def definite(*shape):
        root = rng.normal(size=(*shape, shape[-1])) / np.sqrt(shape[-1])
        return root @ np.swapaxes(root, -1, -2) + 0.5 * np.eye(shape[-1])

    train = quadratic.InnerSample(
        definite(CLIENTS, SAMPLES, INNER),
        0.3 * rng.normal(size=(CLIENTS, SAMPLES, INNER, OUTER)),
        rng.normal(size=(CLIENTS, SAMPLES, INNER)),
    )
    val = quadratic.OuterSample(
        definite(CLIENTS, SAMPLES, OUTER + INNER), 0.3 * rng.normal(size=(CLIENTS, SAMPLES, OUTER + INNER))
    )
    return train, val


def client_data(double=True):
    kind = np.float64 if double else np.float32
    train, val = (jax.tree.map(lambda leaf: leaf.astype(kind), part) for part in clients())
    return fb.ClientData(train, val)


def save_site(path, client, double=True):
    """The ``.npz`` file of one site."""
    data = client_data(double)
    leaves = {part: jax.tree.leaves(getattr(data, part)) for part in ("train", "val")}
    np.savez(path, **{f"{part}{i}": leaf[client] for part, each in leaves.items() for i, leaf in enumerate(each)})


def algorithm(name, double=True, **options):
    kind = np.float64 if double else np.float32
    start = (np.zeros(OUTER, kind), np.zeros(INNER, kind))
    problem = fb.BilevelProblem(
        quadratic.inner_loss, quadratic.outer_loss, lambda key: jax.tree.map(jax.numpy.asarray, start)
    )
    if name == "fedavg":
        return fb.fedavg(
            lambda model, batch: quadratic.inner_loss(jax.numpy.zeros(OUTER, kind), model, batch), start[1], **options
        )
    made = {"fedbio": fb.fedbio, "fedbioacc": fb.fedbioacc}[name]
    steps = dict.fromkeys(("inner_step", "outer_step"), 0.1 if name == "fedbio" else 1.0)
    return made(problem, fb.neumann(terms=3, step=0.3), **{**steps, **options})


def example(data):
    """The rows of one site, as shapes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), (data.train, data.val))


def program(arguments):
    double = arguments.get("double", True)
    made = algorithm(arguments["algorithm"], double, **arguments.get("options", {}))
    return ArrayProgram(made, arguments["rounds"], example(client_data(double)), arguments.get("weights", "uniform"))


def held(arguments):
    """`program`, whose coordinator stands still between two rounds while the file ``hold`` exists: what a test does
    meanwhile takes no rounds, however slow the machine is.  ``pace``: seconds it takes its time in every round, where a run
    is only to be there."""
    made = program(arguments)
    stage, file, pace = made.stage(0, {}, []), Path(arguments.get("hold", "/nonexistent")), arguments.get("pace", 0.0)

    def wait(leaf):
        time.sleep(pace)
        while file.exists():
            time.sleep(0.02)
        return leaf

    def build(settings):
        inner = stage.algorithm.build(settings)
        (phase,) = inner.plan

        def absorb(server, mean):
            return phase.absorb(server, jax.tree.map(lambda leaf: jax.pure_callback(wait, leaf, leaf), mean))

        return inner._replace(plan=(phase._replace(absorb=absorb),), build=build)

    return ArrayProgram(build(stage.algorithm.settings), stage.rounds, stage.example, stage.weights)


def fair_rows(client, kind):
    """Rows with labels and groups, for FCFL."""
    rng = np.random.default_rng([7, client])
    return {
        "features": rng.normal(size=(30 + client, 4)).astype(kind),
        "labels": rng.integers(2, size=30 + client).astype(kind),
        "groups": rng.integers(2, size=30 + client).astype(np.int32),
    }


def fair_algorithm(kind):
    from fedbilevel.fairness.fcfl import fcfl  # with pandas, which no other program here needs
    from fedbilevel.fairness.models import LinearScores

    return fcfl(LinearScores(), np.zeros(4, kind), 0.3, groups=2, stage_one=3)


class Several(ArrayProgram):
    """A stage for every algorithm, so that one job shows that all of them run."""

    def __init__(self, arguments):
        self.names, self.rounds = arguments["algorithms"], arguments["rounds"]
        self.kind = np.float64 if arguments["double"] else np.float32
        self.plain = {name: program({**arguments, "algorithm": name}) for name in self.names if name != "fcfl"}

    def stage(self, number, agreed, answers):
        if number >= len(self.names):
            return None
        name = self.names[number]
        if name != "fcfl":
            return self.plain[name].stage(0, agreed, answers)
        shapes = jax.eval_shape(lambda: fair_rows(0, self.kind))
        return Stage("fcfl", fair_algorithm(self.kind), self.rounds, (shapes, None))

    def rows(self, number, source, agreed, answers):
        name = self.names[number]
        if name != "fcfl":
            train, val = self.plain[name].rows(0, source, agreed, answers)
            return jax.tree.map(lambda leaf: leaf.astype(self.kind), (train, val))
        return fair_rows(int(source.arrays_file.stem.split("-")[1]) - 1, self.kind), None


class Spoilt(Several):
    """Four stages of FedAvg: site-2 replies with NaN, site-3 with a wrong shape, site-2 with something that cannot be decoded,
    and with 40 MB."""

    def __init__(self, arguments):
        super().__init__({**arguments, "algorithms": ["fedavg"], "double": True})
        self.names = ["fedavg"] * 4
        self.here = None

    def stage(self, number, agreed, answers):
        made = super().stage(number, agreed, answers)
        if made is None:
            return None
        return made._replace(algorithm=self.spoilt(made.algorithm, number), name=f"part {number}")

    def rows(self, number, source, agreed, answers):
        self.here = source.arrays_file.stem
        if self.here == "site-2" and number >= 2:
            from nvflare.fuel.f3.cellnet import cell

            cell.encode_payload = partial(spoilt_encoding, cell.encode_payload, number)
        return super().rows(number, source, agreed, answers)

    def spoilt(self, algorithm, number):
        (phase,) = algorithm.plan

        def work(*arguments):
            reply, local = phase.work(*arguments)
            if number == 0 and self.here == "site-2":
                reply = jax.tree.map(lambda leaf: leaf * np.nan, reply)
            if number == 1 and self.here == "site-3":
                reply = jax.tree.map(lambda leaf: leaf[:-1], reply)
            return reply, local

        def build(settings):
            return algorithm.build(settings)._replace(plan=(phase._replace(work=work),), build=build)

        return build(algorithm.settings)


def spoilt_encoding(encode, number, message, *args, **kwargs):
    """NVFlare's, but for replies to a phase."""
    reply = isinstance(message.payload, dict) and "arrays" in message.payload
    size = encode(message, *args, **kwargs)
    if reply:
        message.payload = [b"\xc1 is nothing"] if number == 2 else [bytes(1_000_000)] * 40
    return size
