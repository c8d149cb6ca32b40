"""The script that NVFlare runs for every client."""

import sys
import time
from pathlib import Path

import numpy as np
import nvflare.client as flare
import torch

file, steps, step, log = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
flare.init()
number = int(flare.get_site_name().split("-")[1]) - 1
with np.load(file) as arrays:
    rows, labels = (torch.from_numpy(arrays[name][number]) for name in ("rows", "labels"))
loss = torch.nn.BCEWithLogitsLoss()
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    if number == 0:
        with Path(log).open("a") as times:
            times.write(f"{time.time()}\n")
    model = torch.nn.Linear(rows.shape[1], 1, bias=False)
    model.load_state_dict({"weight": torch.as_tensor(received.params["numpy_key"], dtype=torch.float32)[None]})
    optimizer = torch.optim.SGD(model.parameters(), lr=step)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(rows).squeeze(1), labels).backward()
        optimizer.step()
    trained = {"numpy_key": model.weight.detach().numpy()[0]}
    flare.send(flare.FLModel(params=trained, meta={"NUM_STEPS_CURRENT_ROUND": len(labels)}))
