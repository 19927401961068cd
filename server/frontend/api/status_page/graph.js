// The graph: frontends, leaders, and the replicas of each stage. Dots move on the lines to what has traffic.

import { number, svg, words } from "./dom.js";
import { nameOf } from "./rates.js";

const NARROW = 720; // pixels: below it, the columns become rows
const MOST_CARDS = 6; // more nodes than this in a column are drawn as small squares
const MOST_LINES = 36; // more lines than this between two columns become one
const CARD = { width: 150, least: 84, height: 46, gap: 12 };
const CELL = { size: 20, gap: 5, across: 4 };
const TITLE = 40;
const BETWEEN = 46;
const LIT_MS = 4000;

const level = (rate) => (rate <= 0 ? 0 : rate < 2 ? 1 : rate < 10 ? 2 : rate < 50 ? 3 : 4);

// The columns of the graph, from left to right. A node has `rate` in batches or requests per second.
export function columns(status, rates, requestRate) {
  const frontends = status.frontends.map((each) => ({
    key: `frontend ${each.name}`, label: each.name, state: "ready", rate: requestRate,
    detail: each.host, hint: `host ${each.host}, process ${each.pid}`,
  }));
  const leaders = status.leaders.map((each) => ({
    key: `leader ${each.address}`, label: each.name ?? each.address, state: each.state, rate: each.state === "ready" ? requestRate : 0,
    detail: each.state === "ready" ? `${each.requests_in_flight} in flight` : words(each.state), hint: `${each.address}, host ${each.host ?? "unknown"}`,
  }));
  const stages = status.stages.map((stage) => ({
    title: `Stage ${stage.index}`,
    subtitle: stage.blocks.length > 1 ? `${stage.blocks[0]} … ${stage.blocks.at(-1)}` : stage.blocks.join(),
    nodes: stage.replicas.map((replica) => {
      const key = nameOf(stage.index, replica);
      const rate = replica.state === "ready" ? rates.current(key) : 0;
      return {
        key, label: key, state: replica.state, rate,
        detail: replica.state === "ready" ? `${number(rate)} batches/s` : words(replica.state),
        hint: `${replica.worker ?? "no worker"} on ${replica.host ?? "no host"}, ${replica.device ?? "no device"}`,
      };
    }),
  }));
  return [
    { title: "Frontends", subtitle: "HTTP", nodes: frontends },
    { title: "Leaders", subtitle: "scheduling", nodes: leaders },
    ...stages,
  ].filter((column) => column.nodes.length);
}

// How many nodes stand in a line, so that all lines are about equally long.
const balanced = (total, most) => Math.ceil(total / Math.ceil(total / most));

// Places of all nodes: {places: Map key -> box, boxes: one per column, width, height}. `wide`: columns from left to right.
function layout(made, width, wide) {
  const places = new Map();
  const boxes = [];
  const pitch = wide ? width / made.length : 0;
  let top = 0;
  let height = 0;
  const tallest = Math.max(...made.map((column) => column.nodes.length > MOST_CARDS ? 0 : column.nodes.length * (CARD.height + CARD.gap) - CARD.gap), CARD.height);
  made.forEach((column, index) => {
    const cards = column.nodes.length <= MOST_CARDS && (!wide || pitch - BETWEEN >= CARD.least);
    const total = column.nodes.length;
    const perLine = cards ? (wide ? 1 : Math.min(total, width < 340 ? 2 : 3)) : wide ? Math.max(CELL.across, Math.ceil(total / 16)) : balanced(total, Math.floor(width / (CELL.size + CELL.gap)));
    const roomy = wide ? pitch - BETWEEN : (width - (perLine - 1) * CARD.gap) / perLine;
    const size = cards ? { width: Math.min(CARD.width, roomy), height: CARD.height, gap: CARD.gap } : { width: CELL.size, height: CELL.size, gap: CELL.gap };
    const lines = Math.ceil(total / perLine);
    const used = Math.min(total, perLine);
    const boxWidth = used * (size.width + size.gap) - size.gap;
    const boxHeight = lines * (size.height + size.gap) - size.gap;
    const left = wide ? index * pitch + (pitch - boxWidth) / 2 : (width - boxWidth) / 2;
    const first = (wide ? 0 : top) + TITLE + (wide && boxHeight < tallest ? (tallest - boxHeight) / 2 : 0);
    column.nodes.forEach((node, at) => {
      const x = left + (at % perLine) * (size.width + size.gap);
      const y = first + Math.floor(at / perLine) * (size.height + size.gap);
      places.set(node.key, { x, y, width: size.width, height: size.height, card: cards });
    });
    boxes.push({ x: left, y: first, width: boxWidth, height: boxHeight, title: { x: wide ? index * pitch + pitch / 2 : width / 2, y: wide ? 14 : top + 14 } });
    top = first + boxHeight + BETWEEN - 14;
    height = Math.max(height, first + boxHeight);
  });
  return { places, boxes, height: height + 4 };
}

function curve(from, to, wide) {
  if (wide) {
    const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x, to.y + to.height / 2];
    const bend = (x2 - x1) / 2;
    return `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
  }
  const [x1, y1, x2, y2] = [from.x + from.width / 2, from.y + from.height, to.x + to.width / 2, to.y];
  const bend = (y2 - y1) / 2;
  return `M${x1} ${y1}C${x1} ${y1 + bend} ${x2} ${y2 - bend} ${x2} ${y2}`;
}

const fitting = (text, pixels, perLetter) => {
  const most = Math.floor(pixels / perLetter);
  return text.length <= most ? text : `…${text.slice(1 - most)}`;
};

export class Graph {
  #root;
  #nodes = new Map();
  #lines = [];
  #signature = "";
  #lit = new Set();

  constructor(root) {
    this.#root = root;
  }

  show(status, rates, requestRate) {
    const made = columns(status, rates, requestRate);
    const width = Math.max(280, this.#root.clientWidth);
    const signature = JSON.stringify([width, made.map((column) => column.nodes.map((node) => node.key))]);
    if (signature !== this.#signature) this.#build(made, width);
    this.#signature = signature;
    const states = new Map(made.flatMap((column) => column.nodes.map((node) => [node.key, node])));
    for (const [key, parts] of this.#nodes) this.#update(parts, states.get(key));
    for (const line of this.#lines) {
      const flows = Math.max(...line.to.map((key) => states.get(key)).map((node) => node.rate));
      const usable = [line.from, line.to].every((keys) => keys.some((key) => states.get(key).state === "ready"));
      line.base.setAttribute("class", usable ? "line" : "line dead");
      line.flow.setAttribute("class", `flow f${usable ? level(flows) : 0}`);
    }
    this.#root.firstElementChild?.setAttribute("aria-label", summary(made));
  }

  // Mark these worlds, such as "s0.r1": the path of one request.
  light(worlds) {
    this.#lit = new Set(worlds);
    for (const [key, parts] of this.#nodes) parts.group.classList.toggle("lit", this.#lit.has(key));
    if (worlds.length) setTimeout(() => this.light([]), LIT_MS);
  }

  #build(made, width) {
    const wide = width >= NARROW;
    const { places, boxes, height } = layout(made, width, wide);
    const image = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img" });
    this.#nodes.clear();
    this.#lines = [];
    made.slice(1).forEach((column, at) => {
      for (const line of lines(made[at], column, places, boxes[at], boxes[at + 1])) {
        const path = curve(line.start, line.end, wide);
        const base = svg("path", { d: path, class: "line" });
        const flow = svg("path", { d: path, class: "flow" });
        image.append(base, flow);
        this.#lines.push({ from: line.from, to: line.to, base, flow });
      }
    });
    made.forEach((column, at) => {
      const { x, y } = boxes[at].title;
      const room = wide ? width / made.length - 6 : width - 6;
      image.append(svg("text", { x, y, class: "title" }, column.title));
      image.append(svg("text", { x, y: y + 15, class: "subtitle" }, fitting(column.subtitle, room, 6)));
      for (const node of column.nodes) image.append(this.#node(node, places.get(node.key)));
    });
    this.#root.replaceChildren(image);
  }

  #node(node, place) {
    const group = svg("g", { "data-node": node.key });
    const title = svg("title");
    group.append(title, svg("rect", { x: place.x, y: place.y, width: place.width, height: place.height, rx: place.card ? 8 : 4, class: place.card ? "" : "cell" }));
    let detail = null;
    if (place.card) {
      group.append(svg("circle", { cx: place.x + 13, cy: place.y + 15, r: 4.5 }));
      group.append(svg("text", { x: place.x + 24, y: place.y + 19, class: "name" }, fitting(node.label, place.width - 28, 7.3)));
      detail = svg("text", { x: place.x + 9, y: place.y + 37, class: "detail" });
      group.append(detail);
    }
    this.#nodes.set(node.key, { group, title, detail, width: place.width });
    return group;
  }

  #update(parts, node) {
    parts.group.setAttribute("class", `node ${this.#lit.has(node.key) ? "lit" : ""}`);
    parts.group.dataset.state = node.state;
    parts.title.textContent = `${node.label}: ${words(node.state)}, ${node.detail}\n${node.hint}`;
    if (parts.detail) parts.detail.textContent = fitting(node.detail, parts.width - 16, 6.3);
  }
}

// The lines between two columns: between all nodes, or one for all of them.
function lines(before, after, places, boxBefore, boxAfter) {
  const cards = [...before.nodes, ...after.nodes].every((node) => places.get(node.key).card);
  if (cards && before.nodes.length * after.nodes.length <= MOST_LINES) {
    return before.nodes.flatMap((from) => after.nodes.map((to) => ({
      from: [from.key], to: [to.key], start: places.get(from.key), end: places.get(to.key),
    })));
  }
  return [{ from: before.nodes.map((node) => node.key), to: after.nodes.map((node) => node.key), start: boxBefore, end: boxAfter }];
}

function summary(made) {
  return made.map(({ title, nodes }) => `${title}: ${nodes.filter((node) => ["ready", "standby"].includes(node.state)).length} of ${nodes.length} ready`).join("; ");
}
