"""`python -m eagle3_jax`: the same as the `eagle3-jax` command."""

import sys

from eagle3_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
