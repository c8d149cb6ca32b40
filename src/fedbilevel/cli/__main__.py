"""``python -m fedbilevel.cli``: the same as ``fedbilevel``."""

from fedbilevel.cli import main

main()
