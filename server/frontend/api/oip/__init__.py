"""The Open Inference Protocol, version 2 (KServe, Triton): its routes, tensors and responses.

Start reading in routes.py, then infer_request.py.
"""
