"""pfl-research: an algorithm of one's own whose users' states are in its storage."""

import torch
from common import GROUPS, bilevel_clients
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.user_state import InMemoryUserStateStorage
from pfl.metrics import Metrics
from pfl_run import simulate
from torch_bilevel import local_steps

data = [torch.from_numpy(array) for array in bilevel_clients().values()]
count, _, features = data[0].shape
storage = InMemoryUserStateStorage()
for number in range(count):
    storage.save_state({"inner": torch.zeros(features)}, str(number))


class GroupWeights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = torch.nn.Parameter(torch.zeros(GROUPS))

    def metrics(self, *own, eval=False):
        return {}

    loss = metrics  # a module must have one; local_steps has its own


class FedBiO(FederatedAveraging):
    def train_one_user(self, initial_model_state, model, user_dataset, central_context):
        inner = storage.load_state(user_dataset.user_id)["inner"]
        outer, inner = local_steps(model.pytorch_model.outer, inner, *user_dataset.raw_data)
        with torch.no_grad():
            model.pytorch_model.outer.copy_(outer)
        storage.save_state({"inner": inner}, user_dataset.user_id)
        return model.get_model_difference(initial_model_state), Metrics()


def user_dataset(number):
    return Dataset(raw_data=[array[number] for array in data], user_id=str(number))


simulate(FedBiO(), GroupWeights(), count, user_dataset)
