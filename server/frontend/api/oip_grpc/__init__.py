"""The Open Inference Protocol over gRPC, with the model, limits and errors of `server.frontend.api.oip`. Needs the extra `grpc`.

open_inference.proto    the definition, also for clients
open_inference.binpb    its descriptor, compiled by `make proto`
infer_messages.py       message classes; messages to requests, and predictions to messages
grpc_port.py            the port and its methods: record, authorization, deadline and errors of a call; start reading here

Only a frontend with a gRPC port imports it. May import what server.frontend.api.oip may.
"""
