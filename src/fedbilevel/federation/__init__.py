"""Training over real sites on NVFlare: the same plans as in `simulate`, each site's ``work`` on its own machine.

This folder is the only place that imports ``nvflare``, and within it only ``controller``, ``executor``, ``provision`` and
``sessions`` do: what a round is (``coordinator``, ``site``) is plain code that can be called, tested and carried to
another engine without it.  Install with ``pip install "fedbilevel[federation]"``.
"""
