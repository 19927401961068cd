"""The scheduler: a pure state machine that decides which request goes into which batch, and which replica gets which batch.

May import: nothing but the standard library. No I/O, no clock, no randomness, no tasks. The driver in `server/pipeline` performs its
actions; the simulation in `tests/simulation` runs the same code on simulated time.

Start with `scheduler.py`: its docstring lists the rules. Then:

    events.py, actions.py   input and output
    admission.py            accepts or rejects a request on arrival
    dispatcher.py           forms batches, sends them to replicas
    batch_lifecycle.py      answers, rejects, isolates and requeues; recovers the batches of lost replicas
    batches.py, state.py    the data: requests, batches, replicas and their queues
    estimates/              service times, learned from earlier batches; which batches are late

The words for sending work again. Each sending of a batch to a replica is an attempt.

    word      what is sent again                         where to                                     because
    reroute   the batch, with the input of its stage     another replica of the stage, first in line  its replica was lost
    retry     the batch, with the input of its stage     another replica of the stage, once           the stage raised an error
    hedge     the batch, beside the attempt in flight    another replica of the stage                 it is late; the first output wins
    isolate   each request of the batch, alone           the first stage                              it may be the cause of the failures
    requeue   the requests of the batch, in new batches  the first stage, of the current version      its version lost a stage, or its
                                                                                                      input was lost

Reroutes, retries and hedges have a metric each. All but hedges add 1 to the attempts of an answer.
"""
