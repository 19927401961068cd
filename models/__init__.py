"""Models: export them as bundles, cut bundles into stages, build and optimize a stage.

Imports only torch, torchvision, safetensors and msgspec, and transformers to export its models. Start reading at `bundle.graph` and
`bundle.stage`, and at `export.exporter` for how bundles are made.
"""
