// The first lines: the state of the service, and the last incident with what was sent again and how many requests failed.

import { $, ago, clock, count, duration, element, setText, words } from "./dom.js";

const REPEAT_S = 1; // seconds after which texts with a time are written again
const OVERDUE_S = 5; // without a message for this long, the service does not answer

let seenS = null; // unix time of the last message
let gone = false;
let said = "";
let incident; // undefined: not known yet

function say(state, text) {
  if (said === state + text) return; // a screen reader would repeat it
  said = state + text;
  document.body.dataset.state = $("state").dataset.state = state;
  $("state").replaceChildren(element("b", words(state)), text ? ` ${text}` : "");
}

export function seen() {
  seenS = Date.now() / 1000;
  gone = false;
}

export function lost() {
  gone = true;
  showAge();
}

function showAge() {
  const overdue = seenS !== null && Date.now() / 1000 - seenS > OVERDUE_S;
  if (!gone && !overdue) return;
  say("gone", seenS === null ? "no response from the service; retrying …" : `no response from the service; last seen ${clock(seenS)}, ${ago(seenS)}`);
}

export function showState(status) {
  const kept = { draining: "new requests are rejected", unloaded: "an administrator has unloaded the model" };
  const loading = status.version_loading ? `loading version ${status.version_loading}` : "";
  say(status.state, [kept[status.state] ?? status.reasons.join("; "), loading].filter(Boolean).join("; "));
}

export function showIncident(last) {
  incident = last;
  const failed = `${last.where}${last.worker ? ` (${last.worker})` : ""} failed: ${words(last.detail)}`;
  const others = last.failures > 1 ? `, and ${count(last.failures - 1, "more failure")}` : "";
  $("hero").dataset.state = last.failed ? "failed" : last.ended_unix_s === null ? "open" : "survived";
  $("incident").replaceChildren(element("b", `${failed}${others}`), element("span", "", { id: "incident-age" }));
  const figures = [
    [last.failed, last.failed === 1 ? "request failed" : "requests failed", "failed"],
    [last.rerouted, last.rerouted === 1 ? "batch rerouted" : "batches rerouted", ""],
    [last.resubmitted, last.resubmitted === 1 ? "request sent again" : "requests sent again", ""],
  ];
  if (last.ended_unix_s !== null) figures.push([duration(last.ended_unix_s - last.at_unix_s), "until ready again", ""]);
  $("outcome").replaceChildren(...figures.map(([value, name, kind]) => {
    const item = element("div", "", kind ? { class: kind } : {});
    item.append(element("dt", name), element("dd", String(value)));
    return item;
  }));
  showIncidentAge();
}

function showIncidentAge() {
  if (incident) setText($("incident-age"), ` ${clock(incident.at_unix_s)}, ${ago(incident.at_unix_s)}${incident.ended_unix_s === null ? "; not ready again yet" : ""}`);
}

// A stream that has sent its first messages without an incident has none.
export function noIncident() {
  if (incident === undefined) setText($("incident"), "No failure since this frontend started.");
}

setInterval(() => {
  showAge();
  showIncidentAge();
}, REPEAT_S * 1000);
