"""The command line: ``bethenet infer | sample | info | convert``.

Results go to stdout or, whole or not at all, to ``--output``; everything else goes to stderr. Exit codes: 0 done, 2
wrong use or input, 3 refused for memory, 4 did not converge though ``--require-convergence`` was given.
"""

from bethenet.cli.app import app, main

__all__ = ["app", "main"]
