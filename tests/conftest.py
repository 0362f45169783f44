"""The suite runs on CPU whatever the machine has, unless a marker asks for more."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
