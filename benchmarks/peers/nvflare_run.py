"""NVFlare's simulator: its FedAvg recipe for NumPy models, with a script for every client."""

import tempfile
from pathlib import Path

import numpy as np
from common import ROUNDS, finish, timed
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe.sim_env import SimEnv


def simulate(script, count, size):
    with tempfile.TemporaryDirectory() as folder:
        recipe = NumpyFedAvgRecipe(
            name="logistic", model=[0.0] * size, min_clients=count, num_rounds=ROUNDS,
            train_script=str(Path(__file__).with_name(script)), train_args=f"{folder}/times",
        )  # fmt: skip
        recipe.execute(SimEnv(num_clients=count, num_threads=count, workspace_root=folder))
        (saved,) = Path(folder).rglob("server.npy")
        # A client receives the model of a round when the round before has ended.
        for number, line in enumerate(Path(folder, "times").read_text().split()):
            timed(number, float(line))
        finish(np.load(saved))
