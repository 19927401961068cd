"""Text generation: decoders of transformers in stages that keep a session for each sequence.

`decoder.py` is the stage. Imports `models.stages`, and transformers when a worker loads a decoder.
"""
