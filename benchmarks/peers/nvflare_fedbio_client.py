"""The script that NVFlare runs for every client; y is a variable of it."""

import sys
import time
from pathlib import Path

import nvflare.client as flare
import torch
from common import bilevel_clients
from torch_bilevel import local_steps

flare.init()
number = int(flare.get_site_name().split("-")[1]) - 1
own = [torch.from_numpy(array[number]) for array in bilevel_clients().values()]
inner = torch.zeros(own[0].shape[1])
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    if number == 0:
        with Path(sys.argv[1]).open("a") as times:
            times.write(f"{time.time()}\n")
    outer = torch.as_tensor(received.params["numpy_key"], dtype=torch.float32)
    outer, inner = local_steps(outer, inner, *own)
    flare.send(flare.FLModel(params={"numpy_key": outer.numpy()}, meta={"NUM_STEPS_CURRENT_ROUND": len(own[0])}))
