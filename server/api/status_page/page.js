// The status page: shows the data of GET /events. Data is inserted as text, never as HTML.
"use strict";

const MOST_POINTS = 300;
const MOST_EVENTS = 100;
const WORDS = {
  joining: "joining", serves: "serves", rejoined: "rejoined and serves", takes_over: "takes over", draining: "draining",
  broken: "failed", left: "left", rerouted: "rerouted",
  version_changed: "version changed", leader_ready: "ready", leader_lost: "lost",
};

const $ = (id) => document.getElementById(id);
let points = [];
let lastEvent = 0;
const done = new Map(); // per replica: batches done, time of that count, and rate

function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function duration(seconds) {
  for (const [large, small, size, part] of [["d", "h", 86400, 3600], ["h", "min", 3600, 60], ["min", "s", 60, 1]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${large} ${Math.floor((seconds % size) / part)} ${small}`;
  }
  return `${Math.round(seconds)} s`;
}

// Batches per second since the previous snapshot, for the current generation only.
function rate(key, replica) {
  const now = performance.now() / 1000;
  const before = done.get(key);
  if (before?.generation === replica.generation && now - before.at < 0.9) return before.rate;
  const fresh = before?.generation === replica.generation ? (replica.batches_done - before.count) / (now - before.at) : 0;
  done.set(key, { count: replica.batches_done, generation: replica.generation, at: now, rate: fresh });
  return fresh;
}

function card(stage, replica) {
  const item = element("li", "", { class: "replica", "data-state": replica.state, "data-world": `s${stage}.r${replica.slot}` });
  const title = element("h4", `replica ${replica.slot}`);
  title.append(element("span", replica.state, { class: "word" }));
  const facts = element("dl");
  const failure = replica.last_failure;
  const rows = [
    ["worker", replica.worker ?? "–"],
    ["device", replica.device ?? "–"],
    ["generation", replica.generation],
    ["in flight", replica.in_flight],
    ["batches per second", rate(`${stage}.${replica.slot}`, replica).toFixed(1)],
    ["last failure", failure ? `${failure.cause}, ${duration(Math.max(0, Date.now() / 1000 - failure.at_unix_s))} ago` : "none"],
  ];
  for (const [name, value] of rows) facts.append(element("dt", name), element("dd", String(value)));
  item.append(title, facts);
  return item;
}

function column(stage) {
  const section = element("section", "", { class: "stage", "aria-labelledby": `stage-${stage.index}` });
  const blocks = stage.blocks;
  const list = element("ul", "", { "aria-label": `replicas of stage ${stage.index}` });
  list.append(...stage.replicas.map((replica) => card(stage.index, replica)));
  section.append(
    element("h3", `Stage ${stage.index}`, { id: `stage-${stage.index}` }),
    element("p", blocks.length > 1 ? `${blocks[0]} … ${blocks.at(-1)}` : blocks.join(), { class: "blocks" }),
    list,
  );
  return section;
}

function say(state, text) {
  if ($("state").textContent === text) return; // a screen reader would repeat it
  $("state").dataset.state = state;
  $("state").textContent = text;
}

function list(id, title, names) {
  $(id).hidden = !names.length;
  $(id).textContent = `${title}: ${names.join(", ")}`;
}

function showStatus(status) {
  const ready = status.stages.map((stage) => stage.replicas.filter((replica) => replica.state === "ready").length);
  const missing = status.stages.filter((_, at) => !ready[at]).map((stage) => stage.index);
  if (status.draining) say("draining", "shutting down: new requests are rejected");
  else if (status.unloaded) say("not-ready", "unloaded: an administrator has unloaded the model");
  else if (status.ready) say("ready", "ready: every stage has a ready replica");
  else say("not-ready", `not ready: no ready replica in stage ${missing.join(", ")}`);
  $("model").textContent = `${status.model} ${status.version}`;
  $("uptime").textContent = duration(status.uptime_s);
  $("queue").textContent = status.queue_depth;
  $("flight").textContent = status.requests_in_flight;
  $("redundancy").textContent = Math.min(...ready) - 1;
  $("pipeline").replaceChildren(...status.stages.map(column));
  list("leaders", "Leaders", status.leaders.map((leader) => `${leader.name ?? leader.address} (${leader.state.replace("_", " ")})`));
  list("frontends", "Frontends", status.frontends.map((frontend) => `${frontend.name} (${frontend.connections} connections)`));
  list("spares", "Spares", status.spares.map((spare) => `${spare.worker} (${spare.state})`));
}

function draw(svg, lines, unit) {
  const newest = points.length ? points.at(-1).at_unix_s : 0;
  const top = Math.max(1, ...lines.flatMap(([name]) => points.map((point) => point[name] ?? 0)));
  svg.replaceChildren(...lines.map(([name, style]) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
    line.setAttribute("class", style);
    line.setAttribute("points", points.filter((point) => point[name] !== null)
      .map((point) => `${(MOST_POINTS - (newest - point.at_unix_s)).toFixed(1)},${(78 - (74 * point[name]) / top).toFixed(1)}`).join(" "));
    return line;
  }));
  const last = points.at(-1);
  const now = last ? lines.map(([name, , word]) => `${word} ${last[name] ?? "none"}`).join(", ") : "no data";
  svg.setAttribute("aria-label", `${now}; maximum ${top.toFixed(0)} ${unit}`);
  let label = svg.parentElement.querySelector(".top");
  if (!label) svg.parentElement.append(label = element("span", "", { class: "top", "aria-hidden": "true" }));
  label.textContent = `maximum ${top.toFixed(top < 10 ? 1 : 0)} ${unit}`;
}

function showPoints(added) {
  points = added.length > 1 ? added : points.concat(added).slice(-MOST_POINTS);
  draw($("throughput"), [["answered", "ok", "answered"], ["refused", "refused", "refused"], ["failed", "failed", "failed"]], "per second");
  draw($("latency"), [["p50_ms", "p50", "median"], ["p99_ms", "p99", "99th percentile"]], "ms");
  const last = points.at(-1);
  if (!last) return;
  $("rate").textContent = last.answered.toFixed(1);
  $("p50").textContent = last.p50_ms === null ? "–" : `${last.p50_ms.toFixed(0)} ms`;
  $("p99").textContent = last.p99_ms === null ? "–" : `${last.p99_ms.toFixed(0)} ms`;
}

function showEvent(happened) {
  lastEvent = happened.id;
  const at = new Date(happened.at_unix_s * 1000);
  const item = element("li", "", { class: happened.what, "data-what": happened.what });
  const where = happened.stage === null ? happened.what.startsWith("leader") ? "leader" : "model" : happened.replica === null ? `stage ${happened.stage}` : `stage ${happened.stage} replica ${happened.replica}`;
  item.append(
    element("time", at.toLocaleTimeString(), { datetime: at.toISOString() }),
    `${where} `,
    element("b", WORDS[happened.what] ?? happened.what),
    [happened.worker && ` ${happened.worker}`, happened.generation && ` generation ${happened.generation}`, happened.detail && ` – ${happened.detail}`]
      .filter(Boolean).join(""),
  );
  $("feed").prepend(item);
  while ($("feed").children.length > MOST_EVENTS) $("feed").lastElementChild.remove();
  $("quiet").hidden = true;
}

async function classify(submitted) {
  submitted.preventDefault();
  const file = $("image").files[0];
  const button = submitted.target.querySelector("button");
  if (!file || button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true"); // the disabled attribute would lose keyboard focus
  $("answer").textContent = "…";
  try {
    const response = await fetch("/predict", { method: "POST", body: file, headers: { "Content-Type": file.type } });
    showAnswer(response.ok, await response.json());
  } catch (error) {
    showAnswer(false, { error: `no response from the service: ${error.message}` });
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

function showAnswer(ok, answer) {
  if (!ok) {
    $("answer").replaceChildren(element("p", answer.error ?? "the request failed", { class: "wrong" }));
    return;
  }
  const list = element("ol");
  for (const { label, probability } of answer.predictions) {
    const item = element("li");
    const percent = `${(100 * probability).toFixed(1)} %`;
    item.append(element("span", label), element("meter", "", { value: probability, "aria-label": `${label}: ${percent}` }), element("span", percent));
    list.append(item);
  }
  const times = answer.timings_ms;
  $("answer").replaceChildren(list, element("p", `${times.total.toFixed(0)} ms: decode ${times.decode.toFixed(0)}, ` +
    `queue ${times.queue.toFixed(0)}, compute ${times.compute.toFixed(0)}, transfer ${times.transfer.toFixed(0)}`));
}

function follow() {
  const source = new EventSource("/events");
  source.addEventListener("status", (message) => showStatus(JSON.parse(message.data)));
  source.addEventListener("points", (message) => showPoints(JSON.parse(message.data)));
  source.addEventListener("event", (message) => {
    const happened = JSON.parse(message.data);
    if (happened.id < lastEvent) $("feed").replaceChildren(); // another frontend counts for itself
    if (happened.id !== lastEvent) showEvent(happened);
  });
  source.addEventListener("error", () => {
    say("gone", "no response from the service; retrying…");
    if (source.readyState === EventSource.CLOSED) setTimeout(follow, 3000); // rejected: EventSource does not reconnect
  });
}

$("try").addEventListener("submit", classify);
follow();
