"""Flower: a ClientApp that trains from the server's model."""

import torch
from common import STEP, STEPS, clients
from flower_run import simulate
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    rows, labels = (torch.from_numpy(array[context.node_config["partition-id"]]) for array in clients())
    model = torch.nn.Linear(rows.shape[1], 1, bias=False)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    loss, optimizer = torch.nn.BCEWithLogitsLoss(), torch.optim.SGD(model.parameters(), lr=STEP)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(rows).squeeze(1), labels).backward()
        optimizer.step()
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(labels)})}
    return Message(content=RecordDict(content), reply_to=message)


count, _, features = clients()[0].shape
simulate(app, count, torch.zeros(1, features))
