// The list of events, the newest first.

import { $, element } from "./dom.js";

const MOST_EVENTS = 100;
const WORDS = {
  joining: "joining", serves: "serves", rejoined: "rejoined and serves", takes_over: "takes over", draining: "draining",
  broken: "failed", left: "left", rerouted: "rerouted",
  version_changed: "version changed", leader_ready: "ready", leader_lost: "lost",
};

let lastId = 0;

function place(happened) {
  if (happened.stage === null) return happened.what.startsWith("leader") ? "leader" : "model";
  return happened.replica === null ? `stage ${happened.stage}` : `s${happened.stage}.r${happened.replica}`;
}

export function showEvent(happened) {
  if (happened.id < lastId) $("feed").replaceChildren(); // another frontend counts for itself
  if (happened.id === lastId) return;
  lastId = happened.id;
  const at = new Date(happened.at_unix_s * 1000);
  const item = element("li", "", { class: happened.what, "data-what": happened.what });
  item.append(
    element("time", at.toLocaleTimeString(), { datetime: at.toISOString() }),
    `${place(happened)} `,
    element("b", WORDS[happened.what] ?? happened.what),
    [happened.worker && ` ${happened.worker}`, happened.generation && ` generation ${happened.generation}`, happened.detail && ` – ${happened.detail}`]
      .filter(Boolean).join(""),
  );
  $("feed").prepend(item);
  while ($("feed").children.length > MOST_EVENTS) $("feed").lastElementChild.remove();
  $("quiet").hidden = true;
}
