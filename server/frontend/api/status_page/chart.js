// A chart of the last five minutes with axes and the values at the pointer. Times without data are gaps.

import { clock, element, number, svg } from "./dom.js";

const SPAN_S = 300;
const GAP_S = 2.5; // points further apart than this are not joined
const MARGIN = { left: 40, right: 8, top: 8, bottom: 20 };
const HEIGHT = 150;

// The smallest of 1, 2, 5, 10, 20, … that is not below `value`.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((top) => top >= value);
}

// The parts of a line, as the data of a path. A point without neighbours becomes a dot. `zeros`: whether 0 is drawn.
export function linePath(points, name, x, y, zeros = true) {
  let path = "";
  let lastS = -Infinity;
  for (const point of points) {
    const value = point[name];
    if (value === null || (value === 0 && !zeros)) continue;
    const at = `${x(point.at_unix_s).toFixed(1)} ${y(value).toFixed(1)}`;
    path += point.at_unix_s - lastS > GAP_S ? `M${at}h0` : `L${at}`;
    lastS = point.at_unix_s;
  }
  return path;
}

export class Chart {
  #figure;
  #series;
  #unit;
  #points = [];
  #hoverX = null;
  #width = 300;
  #image = svg("svg", { tabindex: "0", role: "img" });
  #tip = element("div", "", { class: "tip", hidden: "" });

  // `series`: [name in the points, class, words, whether 0 is drawn].
  constructor(figure, series, unit) {
    [this.#figure, this.#series, this.#unit] = [figure, series, unit];
    figure.append(this.#image, this.#tip);
    const follow = (event) => this.#hover(event.clientX - this.#image.getBoundingClientRect().left);
    this.#image.addEventListener("pointermove", follow);
    this.#image.addEventListener("pointerdown", follow);
    this.#image.addEventListener("pointerleave", () => this.#hover(null));
    this.#image.addEventListener("blur", () => this.#hover(null));
    this.#image.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -4, ArrowRight: 4 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.#hover(Math.min(this.#width - MARGIN.right, Math.max(MARGIN.left, (this.#hoverX ?? this.#width) + step)));
    });
  }

  show(points) {
    this.#points = points;
    this.#draw();
  }

  #draw() {
    const points = this.#points;
    const width = this.#width = Math.max(240, this.#image.clientWidth || 240);
    const endS = points.length ? points.at(-1).at_unix_s : Date.now() / 1000;
    const top = roundUp(Math.max(1, ...this.#series.flatMap(([name]) => points.map((point) => point[name] ?? 0))));
    const x = (atS) => MARGIN.left + (width - MARGIN.left - MARGIN.right) * (1 - (endS - atS) / SPAN_S);
    const y = (value) => HEIGHT - MARGIN.bottom - ((HEIGHT - MARGIN.bottom - MARGIN.top) * value) / top;
    const parts = [];
    for (const value of [0, top / 2, top]) {
      parts.push(svg("path", { d: `M${MARGIN.left} ${y(value)}H${width - MARGIN.right}`, class: "grid" }));
      parts.push(svg("text", { x: MARGIN.left - 6, y: y(value) + 4, class: "tick end" }, Number.isInteger(value) ? value : value.toFixed(1)));
    }
    for (const minutes of [5, 4, 3, 2, 1, 0]) {
      const at = x(endS - 60 * minutes);
      const place = minutes === 5 ? "tick start" : minutes === 0 ? "tick end" : "tick";
      if (width > 420 || minutes % 5 === 0) parts.push(svg("text", { x: at, y: HEIGHT - 4, class: place }, minutes ? `${minutes} min` : "now"));
    }
    for (const [name, style, , zeros] of this.#series) parts.push(svg("path", { d: linePath(points, name, x, y, zeros), class: `curve ${style}` }));
    const nearest = this.#hoverX === null ? null : closest(points, (point) => Math.abs(x(point.at_unix_s) - this.#hoverX));
    if (nearest) parts.push(svg("path", { d: `M${x(nearest.at_unix_s)} ${MARGIN.top}V${y(0)}`, class: "cursor" }));
    this.#image.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.#image.replaceChildren(...parts);
    const last = points.at(-1);
    this.#image.setAttribute("aria-label", last ? this.#values(last) : "no data");
    this.#showTip(nearest, nearest && x(nearest.at_unix_s));
  }

  #hover(at) {
    this.#hoverX = at;
    this.#draw();
  }

  #values(point) {
    return this.#series.map(([name, , word]) => `${word} ${point[name] === null ? "no responses" : `${number(point[name])} ${this.#unit}`}`).join(", ");
  }

  #showTip(point, at) {
    this.#tip.hidden = !point;
    if (!point) return;
    this.#tip.replaceChildren(element("b", clock(point.at_unix_s)), ...this.#series.map(([name, style, word]) =>
      element("span", `${word}: ${point[name] === null ? "–" : `${number(point[name])} ${this.#unit}`}`, { class: style })));
    const right = at > this.#width / 2;
    this.#tip.style.left = right ? "auto" : `${at + 20}px`;
    this.#tip.style.right = right ? `${this.#width - at + 20}px` : "auto";
  }
}

function closest(points, distance) {
  return points.reduce((best, point) => (best === null || distance(point) < distance(best) ? point : best), null);
}
