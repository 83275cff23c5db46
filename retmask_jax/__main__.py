"""`python -m retmask_jax` is the same as `retmask`."""

import sys

from retmask_jax.cli import main

sys.exit(main())
