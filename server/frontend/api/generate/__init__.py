"""Text generation over the API of OpenAI, with streams that survive the loss of workers and leaders.

Start with `openai_routes.py`; `generation.py` has the loop over the tokens, and `text_codec.py` texts and tokens.
"""
