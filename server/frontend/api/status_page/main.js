// The status page: follows GET /events and passes each message to the parts of the page.

import { Chart } from "./chart.js";
import { $, duration, element, number, setText, words } from "./dom.js";
import { showEvent } from "./events.js";
import { Graph } from "./graph.js";
import { showRollout, startOperating } from "./operate.js";
import { Rates } from "./rates.js";
import { ReplicaTable } from "./replicas.js";
import { lost, seen, showState } from "./state.js";
import { startTrying } from "./try.js";
import { addPoints, addressOf, LATENCY, showVersions, THROUGHPUT } from "./versions.js";

const RETRY_MS = 3000;

const rates = new Rates();
const graph = new Graph($("graph"));
const table = new ReplicaTable($("replicas"));
const throughput = new Chart($("throughput"), THROUGHPUT, "per second");
const latency = new Chart($("latency"), LATENCY, "ms");
let points = [];
let status = null;
const view = { byHost: false, onlyProblems: false };

function showStatus(fresh) {
  status = fresh;
  const ready = status.stages.map((stage) => stage.replicas.filter((replica) => replica.state === "ready").length);
  showState(status);
  showRollout(status);
  setText($("model"), `${status.model} ${status.version}`);
  showModels(Object.entries(status.models));
  showVersions(status.model, status.shares);
  setText($("uptime"), duration(status.uptime_s));
  setText($("queue"), status.queue_depth);
  setText($("flight"), status.requests_in_flight);
  setText($("redundancy"), redundancy(ready));
  setText($("observer"), status.frontends.length > 1 ? "(requests of this frontend)" : "");
  rates.update(status);
  draw();
}

// Links to the pages of the other models, with their states.
function showModels(models) {
  $("models").hidden = models.length < 2;
  const links = models.map(([name, state]) => element("a", `${name}: ${words(state)}`, {
    href: `/?model=${addressOf(name, status.shares)}`, "data-state": state, ...(name === status.model ? { "aria-current": "page" } : {}),
  }));
  if ($("models").textContent !== links.map((link) => link.textContent).join("")) $("models").replaceChildren(...links);
}

// How many workers each stage can lose; unknown while the service cannot serve.
function redundancy(ready) {
  const fewest = ready.length ? Math.min(...ready) : 0;
  return fewest ? fewest - 1 : "–";
}

function draw() {
  if (!status) return;
  graph.show(status, rates, points.at(-1)?.answered ?? 0);
  table.show(status, rates, view);
}

function showPoints(added) {
  points = addPoints(points, added);
  drawCharts();
  const last = points.at(-1);
  if (!last) return;
  setText($("rate"), number(last.answered));
  setText($("p50"), last.p50_ms === null ? "–" : `${last.p50_ms.toFixed(0)} ms`);
  setText($("p99"), last.p99_ms === null ? "–" : `${last.p99_ms.toFixed(0)} ms`);
}

function drawCharts() {
  throughput.show(points);
  latency.show(points);
}

function follow() {
  const source = new EventSource(`/events${location.search}`);
  const on = (kind, show) => source.addEventListener(kind, (message) => {
    seen();
    show(JSON.parse(message.data));
  });
  on("status", showStatus);
  on("points", showPoints);
  on("event", showEvent);
  source.addEventListener("error", () => {
    lost();
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, RETRY_MS); // rejected: EventSource does not reconnect
  });
}

async function start() {
  for (const [id, option] of [["by-host", "byHost"], ["only-problems", "onlyProblems"]]) {
    $(id).addEventListener("click", () => {
      view[option] = !view[option];
      $(id).setAttribute("aria-pressed", view[option]);
      draw();
    });
  }
  new ResizeObserver(() => { draw(); drawCharts(); }).observe($("graph"));
  follow();
  const response = await fetch(`/${location.search}`, { headers: { Accept: "application/json" } });
  const listing = await response.json();
  startOperating(listing);
  await startTrying(listing, (worlds) => graph.light(worlds));
}

start();
