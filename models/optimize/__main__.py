"""Compiles one stage: python -m models.optimize PACKAGES FOLDER. See `compiling.main`."""

import sys

from models.optimize.compiling import main

sys.exit(main(*sys.argv[1:]))
