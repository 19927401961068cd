"""Griffe extension for docstrings that are shorter than Google style allows.

A section may follow text or another section without a blank line, its title may have more words (`Raises, when awaited:`),
and one line may describe several names (`host, pid: where it runs`).
"""

import re
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"(?<=[^\n])\n(?=(?:Args|Attributes|Raises)\b.*:\n    )")
LONGER_TITLE = re.compile(r"^(Raises)(, [\w ]+):$", re.MULTILINE)
NAMES = re.compile(r"^    \w+(?:, \w+)+(?=: )", re.MULTILINE)
NO_BREAK = "\N{NO-BREAK SPACE}"
"""Griffe would read the text after a plain space as a type."""


class CompactDocstrings(Extension):
    """Rewrites docstrings to Google style before Griffe parses them."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = LONGER_TITLE.sub(r"\1: \1\2", SECTION.sub("\n\n", obj.docstring.value))
            obj.docstring.value = NAMES.sub(lambda names: "    " + names[0].strip().replace(", ", f",{NO_BREAK}"), text)
