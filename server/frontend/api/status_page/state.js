// The first line: the state of the service.

import { $, ago, clock, element, words } from "./dom.js";

const REPEAT_S = 1; // seconds after which texts with a time are written again
const OVERDUE_S = 5; // without a message for this long, the service does not answer

let seenS = null; // unix time of the last message
let gone = false;
let said = "";

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

setInterval(showAge, REPEAT_S * 1000);
