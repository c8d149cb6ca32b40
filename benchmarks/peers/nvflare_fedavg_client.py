"""The script that NVFlare runs for every client."""

import sys
import time
from pathlib import Path

import nvflare.client as flare
import torch
from common import STEP, STEPS, clients

flare.init()
number = int(flare.get_site_name().split("-")[1]) - 1
rows, labels = (torch.from_numpy(array[number]) for array in clients())
loss = torch.nn.BCEWithLogitsLoss()
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    if number == 0:
        with Path(sys.argv[1]).open("a") as times:
            times.write(f"{time.time()}\n")
    model = torch.nn.Linear(rows.shape[1], 1, bias=False)
    model.load_state_dict({"weight": torch.as_tensor(received.params["numpy_key"], dtype=torch.float32)[None]})
    optimizer = torch.optim.SGD(model.parameters(), lr=STEP)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(model(rows).squeeze(1), labels).backward()
        optimizer.step()
    trained = {"numpy_key": model.weight.detach().numpy()[0]}
    flare.send(flare.FLModel(params=trained, meta={"NUM_STEPS_CURRENT_ROUND": len(labels)}))
