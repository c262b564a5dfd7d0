"""`python -m hetero_runtime`: the command line without an installed script."""

from hetero_runtime.cli import main

main()
