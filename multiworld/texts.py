"""Sanitizes texts received from other processes, for use in logs, metrics and replies, and limits their length."""

MAX_NAME_CHARS = 64
MAX_HOST_CHARS = 253
"""Length limit of a DNS name."""
MAX_TEXT_CHARS = 2000


def one_line(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Return `text` on one line, with unprintable characters escaped, cut to `limit` characters."""
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[: limit + 1])
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
