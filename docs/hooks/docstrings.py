"""Griffe extension: reads the house's docstrings, which are a little terser than Google's style.

A section may follow upon a line of text or another section without a blank line, its title may say more (`Raises, when awaited:`),
and one line may tell of several names (`host, pid: where it runs`).
"""

import re
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Raises)\b.*:\n    )")
LONGER_TITLE = re.compile(r"^(Raises)(, [\w ]+):$", re.MULTILINE)
NAMES = re.compile(r"^    \w+(?:, \w+)+(?=: )", re.MULTILINE)
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Griffe takes what follows upon a plain space for the type."""


class HouseStyle(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = LONGER_TITLE.sub(r"\1: \1\2", SECTION.sub("\n\n", obj.docstring.value))
            obj.docstring.value = NAMES.sub(lambda names: "    " + names[0].strip().replace(", ", f",{NO_BREAK}"), text)
