"""Data edges: tensors go directly from the process that has them to the process that needs them.

A producer keeps tensors in a `TensorStore` and answers fetches on its own port. A consumer opens an edge, a world of two,
when it first needs a tensor of a producer (`Edge`). An edge fails alone. `Edges` owns all of them for one process; start reading there.
Imports only `common.wire`, `common.config`, `common.metrics` and the library.
"""
