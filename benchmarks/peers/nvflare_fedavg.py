"""NVFlare: federated averaging."""

from common import clients
from nvflare_run import simulate

if __name__ == "__main__":
    count, _, features = clients()[0].shape
    simulate("nvflare_fedavg_client.py", count, features)
