// The charts of the other versions of the model. Each version sends its own events.

import { Chart } from "./chart.js";
import { $, element, setText } from "./dom.js";

export const THROUGHPUT = [["answered", "ok", "answered"], ["refused", "refused", "refused", false], ["failed", "failed", "failed", false]];
export const LATENCY = [["slowest_ms", "slowest", "slowest"], ["p99_ms", "p99", "99th percentile"], ["p50_ms", "p50", "median"]];
const MOST_POINTS = 300;

const shown = new Map(); // name -> { section, title, source }

// Messages have one point, or all points that the service has kept.
export const addPoints = (points, added) => (added.length === 1 ? points.concat(added).slice(-MOST_POINTS) : added);

export const shareText = (share) => (share === "shadow" ? "shadow: its responses are compared and not returned" : `${+share.toFixed(1)} % of the requests`);

// NAME@VERSION of one of several versions: NAME alone is any of them.
export const addressOf = (name, shares) => encodeURIComponent(name in shares && !name.includes("@") ? `${name}@1` : name);

function figure(id) {
  const made = element("figure", "", { class: "card" });
  made.append($(id).querySelector("figcaption").cloneNode(true));
  return made;
}

function open(name, address) {
  const [section, title] = [element("section", "", { class: "charts", "data-version": name }), element("h2")];
  const figures = [figure("throughput"), figure("latency")];
  section.append(title, ...figures);
  $("versions").append(section);
  const charts = [new Chart(figures[0], THROUGHPUT, "per second"), new Chart(figures[1], LATENCY, "ms")];
  const source = new EventSource(`/events?model=${address}`);
  let points = [];
  source.addEventListener("points", (message) => {
    points = addPoints(points, JSON.parse(message.data));
    for (const chart of charts) chart.show(points);
  });
  shown.set(name, { section, title, source });
  return shown.get(name);
}

// `shares`: by name, with that of `model`, which the page shows in full. Empty if there is one version.
export function showVersions(model, shares) {
  setText($("share"), model in shares ? `(${shareText(shares[model])})` : "");
  for (const [name, { section, source }] of shown) {
    if (name in shares && name !== model) continue;
    source.close();
    section.remove();
    shown.delete(name);
  }
  for (const [name, share] of Object.entries(shares)) {
    if (name !== model) setText((shown.get(name) ?? open(name, addressOf(name, shares))).title, `${name}: ${shareText(share)}`);
  }
}
