"""Both ends of a federated run, without any network: what is asked, what is answered, what is kept."""
