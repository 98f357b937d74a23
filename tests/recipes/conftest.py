"""The stages of the translator's recipe are scripts in a folder; each imports the others by name, as Python runs them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "translator"))
