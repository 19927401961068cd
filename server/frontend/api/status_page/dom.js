// Elements and texts. Data is inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export function svg(tag, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Change the text only if it differs: a screen reader repeats a live region that is set again.
export function setText(node, text) {
  if (node.textContent !== String(text)) node.textContent = text;
}

export function duration(seconds) {
  for (const [large, small, size, part] of [["d", "h", 86400, 3600], ["h", "min", 3600, 60], ["min", "s", 60, 1]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${large} ${Math.floor((seconds % size) / part)} ${small}`;
  }
  return `${Math.max(0, Math.round(seconds))} s`;
}

export const ago = (unixS) => `${duration(Date.now() / 1000 - unixS)} ago`;

export const clock = (unixS) => new Date(unixS * 1000).toLocaleTimeString();

export const count = (number, noun, nouns = `${noun}s`) => `${number} ${number === 1 ? noun : nouns}`;

export const words = (state) => state.replaceAll("_", " ");

export function number(value) {
  return value >= 100 ? value.toFixed(0) : value.toFixed(1);
}
