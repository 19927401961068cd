// One row per replica, in groups: by stage, or by host.

import { ago, element, number, setText, svg, words } from "./dom.js";
import { nameOf } from "./rates.js";

const COLUMNS = ["replica", "state", "worker", "host", "device", "in flight", "batches/s", "last failure"];
const SPARK = { width: 72, height: 18 };

// The groups in their order, with their rows. `onlyProblems`: only replicas that are not ready, or have failed.
export function groups(status, { byHost, onlyProblems }) {
  const rows = [
    ...status.stages.flatMap((stage) => stage.replicas.map((replica) => ({ name: nameOf(stage.index, replica), stage: stage.index, replica }))),
    ...status.spares.map((replica) => ({ name: nameOf(null, replica), stage: null, replica })),
  ];
  const titles = new Map();
  for (const row of rows.filter(({ replica }) => !onlyProblems || replica.state !== "ready" || replica.last_failure)) {
    const title = byHost ? row.replica.host ?? "no host" : row.stage === null ? "Spares" : `Stage ${row.stage}`;
    titles.set(title, [...(titles.get(title) ?? []), row]);
  }
  return [...titles].map(([title, members]) => ({ title, members }));
}

function spark(samples) {
  const most = Math.max(1, ...samples.map((rate) => rate ?? 0));
  const step = SPARK.width / 59;
  const left = SPARK.width - (samples.length - 1) * step;
  let path = "";
  let joined = false;
  samples.forEach((rate, at) => {
    if (rate !== null) path += `${joined ? "L" : "M"}${(left + at * step).toFixed(1)} ${(SPARK.height - 2 - ((SPARK.height - 4) * rate) / most).toFixed(1)}${joined ? "" : "h0"}`;
    joined = rate !== null;
  });
  return path;
}

function failureText(failure) {
  return failure ? `${failure.cause}, ${ago(failure.at_unix_s)}` : "none";
}

export class ReplicaTable {
  #root;
  #rows = new Map();
  #bodies = new Map();
  #signature = "";
  #table = element("table");

  constructor(root) {
    this.#root = root;
    const head = element("tr");
    head.append(...COLUMNS.map((name) => element("th", name, { scope: "col" })));
    const top = element("thead");
    top.append(head);
    this.#table.append(top);
    root.append(this.#table);
  }
  show(status, rates, view) {
    const made = groups(status, view);
    const signature = JSON.stringify(made.map(({ title, members }) => [title, members.map((row) => row.name)]));
    if (signature !== this.#signature) this.#build(made);
    this.#signature = signature;
    for (const { title, members } of made) {
      const ready = members.filter((row) => row.replica.state === "ready").length;
      setText(this.#bodies.get(title), `${title}: ${ready} of ${members.length}${view.onlyProblems ? " shown" : ""} ready`);
      for (const row of members) this.#update(this.#rows.get(row.name), row, rates);
    }
    this.#root.classList.toggle("long", this.#rows.size > 16);
  }

  #build(made) {
    this.#rows.clear();
    this.#bodies.clear();
    const bodies = made.map(({ title, members }) => {
      const body = element("tbody");
      const heading = element("tr", "", { class: "group" });
      const cell = element("th", "", { colspan: COLUMNS.length, scope: "rowgroup" });
      heading.append(cell);
      this.#bodies.set(title, cell);
      body.append(heading, ...members.map((row) => this.#row(row.name)));
      return body;
    });
    this.#table.replaceChildren(this.#table.tHead, ...bodies);
  }

  #row(name) {
    const row = element("tr", "", { class: "replica", "data-world": name });
    const cells = COLUMNS.map((column, at) => (at ? element("td", "", { class: column.replace(/\W/g, "-") }) : element("th", name, { scope: "row" })));
    const image = svg("svg", { class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, width: SPARK.width, height: SPARK.height, "aria-hidden": "true" });
    const line = svg("path");
    image.append(line);
    const rate = element("span");
    cells[6].append(image, rate);
    row.append(...cells);
    this.#rows.set(name, { row, cells, line, rate });
    return row;
  }

  #update({ row, cells, line, rate }, { name, replica }, rates) {
    row.dataset.state = replica.state;
    setText(cells[1], words(replica.state));
    setText(cells[2], replica.worker ?? "–");
    setText(cells[3], replica.host ?? "–");
    setText(cells[4], replica.device ?? "–");
    setText(cells[5], replica.in_flight);
    line.setAttribute("d", spark(rates.samples(name)));
    setText(rate, replica.state === "ready" ? number(rates.current(name)) : "–");
    setText(cells[7], failureText(replica.last_failure));
    cells[7].classList.toggle("none", !replica.last_failure);
    cells[7].title = replica.last_failure?.detail ?? "";
    cells[2].title = replica.pid === null ? "" : `process ${replica.pid}, generation ${replica.generation}`;
  }
}
