"""Flower: a ClientApp that keeps y in the state of its context."""

import torch
from common import GROUPS, bilevel_clients
from flower_run import simulate
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch_bilevel import local_steps

app = ClientApp()


@app.train()
def train(message, context):
    own = [torch.from_numpy(array[context.node_config["partition-id"]]) for array in bilevel_clients().values()]
    outer = message.content["arrays"].to_torch_state_dict()["weight"]
    if "inner" in context.state:
        inner = context.state["inner"].to_torch_state_dict()["weight"]
    else:
        inner = torch.zeros(own[0].shape[1])
    outer, inner = local_steps(outer, inner, *own)
    context.state["inner"] = ArrayRecord({"weight": inner})
    content = {"arrays": ArrayRecord({"weight": outer}), "metrics": MetricRecord({"num-examples": len(own[0])})}
    return Message(content=RecordDict(content), reply_to=message)


simulate(app, len(bilevel_clients()["rows"]), torch.zeros(GROUPS))
