"""Plain PyTorch: a loop over the clients."""

import torch
from common import GROUPS, ROUNDS, bilevel_clients, finish, round_ended
from torch_bilevel import local_steps

data = [torch.from_numpy(array) for array in bilevel_clients().values()]
count, _, features = data[0].shape
server, inner = torch.zeros(GROUPS), torch.zeros(count, features)
for _ in range(ROUNDS):
    total = torch.zeros(GROUPS)
    for number in range(count):
        outer, inner[number] = local_steps(server, inner[number], *(array[number] for array in data))
        total += outer
    server = total / count
    round_ended()
finish(server)
