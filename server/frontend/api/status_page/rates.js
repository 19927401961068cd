// Batches per second of each replica, from successive snapshots.

const SAMPLES = 60;
const SMOOTHED = 3;
const LEAST_S = 0.5;

export const nameOf = (stage, replica) => (stage === null ? replica.world : `s${stage}.r${replica.slot}`);

export class Rates {
  #replicas = new Map();

  // A sample is null if nothing is known: the first snapshot, another generation, or a lost leader.
  update(status, nowS = performance.now() / 1000) {
    for (const stage of status.stages) {
      for (const replica of stage.replicas) {
        const key = nameOf(stage.index, replica);
        const before = this.#replicas.get(key);
        if (before && nowS - before.atS < LEAST_S) continue;
        const done = replica.batches_done - (before?.done ?? 0);
        const same = before && before.worker === replica.worker && before.generation === replica.generation && done >= 0;
        const rate = same && replica.state === "ready" ? done / (nowS - before.atS) : null;
        const samples = [...(before?.samples ?? []), rate].slice(-SAMPLES);
        this.#replicas.set(key, { done: replica.batches_done, worker: replica.worker, generation: replica.generation, atS: nowS, samples });
      }
    }
  }

  samples(key) {
    return this.#replicas.get(key)?.samples ?? [];
  }

  // The mean of the last seconds; 0 while nothing is known.
  current(key) {
    const known = this.samples(key).slice(-SMOOTHED).filter((rate) => rate !== null);
    return known.length ? known.reduce((sum, rate) => sum + rate, 0) / known.length : 0;
  }
}
