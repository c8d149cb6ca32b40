"""Flower's simulation: a ClientApp and a ServerApp with the FedAvg strategy."""

import os

import torch
from common import ROUNDS, STEP, STEPS, clients, finish, round_ended
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

all_rows, all_labels = (torch.from_numpy(array) for array in clients())
count, _, features = all_rows.shape
client_app, server_app = ClientApp(), ServerApp()


@client_app.train()
def train(message, context):
    number = context.node_config["partition-id"]
    rows, labels = all_rows[number], all_labels[number]
    model = torch.nn.Linear(features, 1, bias=False)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss, optimizer = torch.nn.BCEWithLogitsLoss(), torch.optim.SGD(model.parameters(), lr=STEP)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(rows).squeeze(1), labels).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(content=RecordDict(content), reply_to=message)


@server_app.main()
def main(grid, context):
    start = ArrayRecord({"weight": torch.zeros(1, features)})
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=count, min_available_nodes=count)
    found = strategy.start(grid=grid, initial_arrays=start, num_rounds=ROUNDS, evaluate_fn=evaluated)
    finish(found.arrays.to_torch_state_dict()["weight"])


def evaluated(number, arrays):
    if number > 0:
        round_ended()


run_simulation(
    server_app, client_app, num_supernodes=count,
    backend_config={
        "client_resources": {"num_cpus": 1, "num_gpus": 0},
        "init_args": {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False},
    },
)  # fmt: skip
