"""Options of the chaos tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run whole matrices of faults, not a sample: pytest tests/chaos --full"
    )
