"""Training over real sites on NVFlare: the same plans as in `simulate`, each site's ``work`` on its own machine.

``protocol`` is what a round is, plain code that can be called, tested and carried to another engine; ``nvflare`` carries it;
``operator`` makes kits, starts them and stays with a run.  Only the latter two import ``nvflare``: install it with
``pip install "fedbilevel[federation]"``.
"""
