"""The scheduler: forms batches from requests, assigns batches to replicas, and handles failures.

It is pure: no I/O, no clock, no randomness, no tasks. It imports nothing but the standard library.
`server/leader/pipeline` performs its actions in production; the simulation in `tests/simulation` runs the same code in virtual time.

    scheduler = Scheduler(SchedulerConfig(num_stages=2))
    for action in scheduler.handle(ReplicaReady("s0.r0#1@2", stage=0, version="v1"), now_s=time.monotonic()):
        perform(action)
    wake_at(scheduler.next_wakeup_s())  # then handle(Tick(), now_s)

The rules:

- Every accepted request gets exactly one `Answer` row or `Reject`, by its deadline at the latest, unless it is cancelled.
- A batch is formed from requests with equal keys, in the order of arrival, when it is full or its oldest request has waited
  `batch_timeout_s`. If the request at the head of the queue has waited that long, its key goes next, before other keys that fill a batch:
  a rare key does not starve. With `adaptive_batching` a partial batch is sent at once to a replica of stage 0 that has nothing in
  flight; while all replicas are busy, it waits until one is about to become idle, estimated from recent service times.
- A batch has at most `slow_batch_size` rows, and up to `max_batch_size` while each stage computes that many in `FAST_BATCH_S`.
- A batch is formed only when a replica of stage 0 has room and no later stage is saturated. Until then requests stay in the queue, and
  batches become larger. A batch keeps the model version that it began with.
- A batch goes to the replica with the fewest rows in flight. A replica has at most `window` batches in flight.
- A batch in flight on a lost replica is rerouted: it goes to the head of its stage's queue, with the input that the driver stored. After
  `max_attempts - 1` broken worlds its requests are isolated: each starts again, alone in its batch and alone on its replica. A request
  that breaks a world alone is rejected as poison. A replica that was draining, or was lost with cause "left", does not count.
- A batch whose stage raised is retried once, on another replica. Then it is halved: both parts start again, each alone on its replica, and
  a part whose stage raises is halved in turn. A request whose stage raises alone is rejected as stage_error. A batch that the driver
  failed to send is halved at once, and so is one whose input the model does not take, such as an index out of range. A request that
  fails so alone is rejected as invalid_input, without another attempt.
- Work for a stage without replicas waits `recovery_grace_s`, counted from when the stage lost its last replica. Then it is rejected, and
  so are new requests until the stage has a replica. Requests whose version lost a stage are requeued: they start again under
  another complete version.
- A late batch is hedged: it is sent to a second replica, and the first output wins. It goes before all others as soon as a replica has
  room. If the hedge is late too, the replica that keeps their input may be frozen: the requests of the batch are requeued.
- An output may stay at its replica (`BatchDone.kept`). If this replica is lost, the requests of the batch are requeued. A draining
  replica is released when it keeps no input.
- A replica with batches in flight that returns none for `hang_timeout_s` is failed. So is a replica that raised on several consecutive
  batches which then succeeded elsewhere.
- A request that cannot be answered by its deadline, by the time that full batches take, is rejected on arrival: see `admission.py`.
- Late events (about a removed replica or an answered batch) have no effect.

An event costs O(log n) in the number of replicas and open requests.

Start reading at `scheduler.py`, which handles events and sends batches. Then:

    events.py, actions.py          input and output
    admission.py                   accepts or rejects a request on arrival
    state.py                       the state, when a batch is formed, and the steps: answer, reject, isolate, requeue, reroute
    backlog.py, replica_table.py   its parts: open requests, replicas
    batches.py                     the data types: requests, batches, replicas and their queues
    estimates/                     service times, learned from earlier batches; which batches are late

The words for sending work again. Each sending of a batch to a replica is an attempt.

    word      what is sent again                         where to                                     because
    reroute   the batch, with the input of its stage     another replica of the stage, first in line  its replica was lost
    retry     the batch, with the input of its stage     another replica of the stage, once           the stage raised an error
    hedge     the batch, beside the attempt in flight    another replica of the stage                 it is late; the first output wins
    isolate   each request alone, or half of the batch   the first stage                              it may be the cause of the failures
    requeue   the requests of the batch, in new batches  the first stage, of the current version      its version lost a stage, or its
                                                                                                      input was lost

Reroutes, retries and hedges have a metric each. All but hedges add 1 to the attempts of an answer.
"""
