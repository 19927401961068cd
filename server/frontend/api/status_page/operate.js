// Operator actions, on the admin port only: a rolling restart and loading a version, both with their progress.

import { $, duration, setText } from "./dom.js";

const REFRESH_MS = 500;

let model = "";
let running = false;
let rollout = null; // of the version that is being loaded, as in GET /status

export function showRollout(status) {
  rollout = status.rollout;
}

function rolloutText() {
  if (!rollout) return "waiting for a leader";
  if (rollout.phase === "reading") return "the leader reads the weights";
  if (rollout.phase === "ending") return "waiting for requests with the former version";
  const passed = `${rollout.passed.length} of ${rollout.workers} workers have passed the self-test`;
  return `${rollout.worker ? `${rollout.worker} (${rollout.world}) loads its stage` : "a stage waits for a ready worker"}; ${passed}`;
}

export function startOperating(listing) {
  model = listing.model;
  const offered = "POST /admin/rolling-restart" in listing.endpoints;
  $("operate").hidden = !offered;
  $("elsewhere").hidden = offered;
  $("operate").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) perform(event.submitter.value === "load" ? loadVersion : restartWorkers);
  });
}

async function perform(action) {
  running = true;
  for (const button of [$("restart"), $("load")]) button.setAttribute("aria-disabled", "true");
  $("progress").hidden = false;
  $("progress").removeAttribute("value"); // without a value: busy
  try {
    setText($("outcome-of-action"), await action());
  } catch (error) {
    setText($("outcome-of-action"), `failed: ${error.message}`);
  } finally {
    running = false;
    $("progress").hidden = true;
    for (const button of [$("restart"), $("load")]) button.removeAttribute("aria-disabled");
  }
}

async function post(path, body) {
  const response = await fetch(path, {
    method: "POST", body: JSON.stringify(body),
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${$("key").value}` },
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => ({}));
  throw new Error(told.error ?? `status ${response.status}`);
}

async function restartWorkers() {
  setText($("outcome-of-action"), "restarting the workers in turn …");
  const response = await post("/admin/rolling-restart", {});
  let last = null;
  for await (const step of lines(response.body)) {
    last = step;
    if (step.total === undefined) continue;
    $("progress").value = (step.number - (step.state === "restarted" ? 0 : 1)) / step.total;
    setText($("outcome-of-action"), `${step.number} of ${step.total}: ${step.worker} in ${step.slot} ${step.state === "restarted" ? `is back after ${step.back_s.toFixed(1)} s` : "is restarting …"}`);
  }
  if (last?.state === "done") return `done: ${last.restarted} workers restarted`;
  throw new Error(last?.error ?? "the connection ended before the restart was complete");
}

async function loadVersion() {
  const startedMs = performance.now();
  const elapsed = () => duration((performance.now() - startedMs) / 1000);
  const timer = setInterval(() => {
    if (rollout?.workers) $("progress").value = rollout.passed.length / rollout.workers;
    setText($("outcome-of-action"), `${rolloutText()}, ${elapsed()} …`);
  }, REFRESH_MS);
  try {
    const weights = $("weights").value.trim();
    const response = await post(`/v2/repository/models/${encodeURIComponent(model)}/load`, weights ? { parameters: { weights } } : {});
    const loaded = await response.json();
    return `version ${loaded.version} (${loaded.weights}) serves after ${elapsed()}`;
  } finally {
    clearInterval(timer);
  }
}

// The JSON objects of a response with one per line.
async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    const parts = (rest + (value ?? "")).split("\n");
    rest = parts.pop();
    for (const part of parts.filter(Boolean)) yield JSON.parse(part);
    if (done) return;
  }
}
