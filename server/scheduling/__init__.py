"""The scheduler: a pure state machine that decides which request goes into which batch, and which replica gets which batch.

Start with `scheduler.py`: its docstring lists the scheduling rules. `events.py` is the input, `actions.py` the output, `config.py` the
parameters, `state.py` the data. The driver in `server/pipeline` performs the actions; the simulation in `testing/simulation` runs the
same code on simulated time.

May import: nothing but the standard library. No I/O, no clock, no randomness, no tasks.
"""
