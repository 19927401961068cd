"""Compiles one stage: python -m multiworld_serving.models.optimize PACKAGES FOLDER. See `compiling.main`."""

import sys

from multiworld_serving.models.optimize.compiling import main

sys.exit(main(*sys.argv[1:]))
