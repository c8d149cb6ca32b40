"""NVFlare: FedBiO, by its federated averaging and clients that keep y."""

from common import GROUPS, bilevel_clients
from nvflare_run import simulate

if __name__ == "__main__":
    simulate("nvflare_fedbio_client.py", len(bilevel_clients()["rows"]), GROUPS)
