"""No operator that a bundle may use uses memory that is not its own, or ends its process; see `tests.torture.bundle_operators`."""

from multiworld_serving.models.bundle.operators import OPERATORS
from tests.torture.bundle_operators import fuzz


def test_operators_use_only_memory_of_their_tensors_and_end_no_process() -> None:
    findings, counts = fuzz(seed=0, cases=2 * len(OPERATORS))
    assert findings == []
    assert counts.keys() == set(OPERATORS)


def test_fuzzer_finds_an_operator_that_returns_memory_that_was_not_written() -> None:
    findings, _ = fuzz(seed=0, cases=20, planted="aten.empty.memory_format")
    assert "computes from memory that is not its own" in "\n".join(findings)
