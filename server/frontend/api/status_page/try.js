// The try-out: an image to /predict, or JSON to the Open Inference Protocol if the model takes no images.

import { $, element } from "./dom.js";

const MOST_VALUES = 4096; // an input with more values than this is not filled in
const MOST_SHOWN = 12; // values of an output that are shown

let image = null; // a File
let model = "";
let predictPath = "/predict";
let light = () => {};

// `listing`: of GET /; `lighten`: marks the worlds of a path in the graph.
export async function startTrying(listing, lighten) {
  [model, light] = [listing.model, lighten];
  if (!("POST /predict" in listing.endpoints)) predictPath = `/predict/${model}`;
  if (!Object.keys(listing.endpoints).some((path) => path.startsWith("GET /v2"))) return;
  const response = await fetch(`/v2/models/${encodeURIComponent(model)}`);
  if (!response.ok) return;
  const metadata = await response.json();
  const imageFiles = (metadata.parameters?.input_datatypes ?? "").split(",").includes("BYTES");
  const takesImages = imageFiles && (listing.endpoints[`POST ${predictPath}`] ?? "").startsWith("Classify");
  $("try").hidden = false;
  $(takesImages ? "try-image" : "try-json").hidden = false;
  if (takesImages) startImages();
  else startJson(metadata);
}

function startImages() {
  const drop = $("drop");
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => { event.preventDefault(); take(event.dataTransfer.files[0]); });
  $("image").addEventListener("change", () => take($("image").files[0]));
  $("sample").addEventListener("click", async () => {
    const response = await fetch("/status-page/sample.jpg");
    take(new File([await response.blob()], "sample.jpg", { type: "image/jpeg" }));
    $("curl").textContent = `curl -sS ${location.origin}/status-page/sample.jpg | curl -sS -H 'Content-Type: image/jpeg' --data-binary @- ${location.origin}${predictPath}`;
  });
  $("try-image").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!image) return answer(element("p", "Choose an image first.", { class: "wrong" }));
    const options = { method: "POST", body: image, headers: { "Content-Type": image.type } };
    return send(event.submitter, predictPath, options, showClasses);
  });
  showCommand("photo.jpg");
}

function take(file) {
  if (!file) return;
  if (!$("image").accept.split(",").includes(file.type)) return answer(element("p", `${file.name} is not a JPEG, PNG or WebP image.`, { class: "wrong" }));
  image = file;
  const reader = new FileReader(); // a data: URL, because the page's policy allows no other images
  reader.addEventListener("load", () => { $("preview").src = reader.result; $("preview").hidden = false; });
  reader.readAsDataURL(file);
  $("drop-text").textContent = `${file.name}, ${Math.ceil(file.size / 1024)} kB`;
  $("preview").alt = file.name;
  showCommand(file.name);
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function showCommand(name) {
  $("curl").textContent = `curl -sS -F image=@${/^[\w.-]+$/.test(name) ? name : quoted(name)} ${location.origin}${predictPath}`;
}

function filled(shape, value) {
  const [size, ...rest] = shape;
  return Array.from({ length: size }, () => (rest.length ? filled(rest, value) : value));
}

// [least, most] length of each variable dimension, by its name.
function ranges(metadata) {
  const named = Object.entries(metadata.parameters ?? {}).filter(([name]) => name.startsWith("dimension."));
  return named.map(([name, range]) => [name.replace("dimension.", ""), ...range.split("..").map(Number)]);
}

function startJson(metadata) {
  const variable = ranges(metadata);
  const least = Math.max(1, ...variable.map(([, from]) => from));
  if (variable.length) $("inputs").append(element("p", `Variable lengths (-1): ${variable.map(([name, from, to]) => `${name} is ${from} to ${to}`).join(", ")}.`, { class: "note" }));
  for (const input of metadata.inputs) {
    const shape = input.shape.map((size, at) => (size > 0 ? size : at ? least : 1));
    const small = shape.reduce((product, size) => product * size, 1) <= MOST_VALUES && input.datatype !== "BYTES";
    const area = element("textarea", small ? JSON.stringify(filled(shape, input.datatype === "BOOL" ? true : 0)) : "[]", { id: `input-${input.name}`, rows: 4, spellcheck: "false" });
    $("inputs").append(element("label", `${input.name}: ${input.datatype} [${input.shape.join(", ")}], as JSON`, { for: area.id }), area);
    area.addEventListener("input", () => showJsonCommand(metadata));
  }
  $("try-json").addEventListener("submit", (event) => {
    event.preventDefault();
    let body;
    try {
      body = jsonBody(metadata);
    } catch (error) {
      return answer(element("p", error.message, { class: "wrong" }));
    }
    return send(event.submitter, jsonPath(), { method: "POST", body, headers: { "Content-Type": "application/json" } }, showOutputs);
  });
  showJsonCommand(metadata);
}

const jsonPath = () => `/v2/models/${encodeURIComponent(model)}/infer`;

function shapeOf(data) {
  return Array.isArray(data) ? [data.length, ...(data.length ? shapeOf(data[0]) : [])] : [];
}

function jsonBody(metadata) {
  const inputs = metadata.inputs.map(({ name, datatype }) => {
    let data;
    try {
      data = JSON.parse($(`input-${name}`).value);
    } catch (error) {
      throw new Error(`${name} is not valid JSON: ${error.message}`);
    }
    if (!Array.isArray(data)) throw new Error(`${name} must be an array, such as [[1, 2, 3]]`);
    return { name, datatype, shape: shapeOf(data), data: data.flat(Infinity) };
  });
  return JSON.stringify({ inputs });
}

function showJsonCommand(metadata) {
  try {
    $("curl").textContent = `curl -sS -H 'Content-Type: application/json' -d ${quoted(jsonBody(metadata))} ${location.origin}${jsonPath()}`;
  } catch {
    $("curl").textContent = "";
  }
}

function answer(...parts) {
  $("answer").replaceChildren(...parts);
}

async function send(button, path, options, show) {
  if (button.getAttribute("aria-disabled") === "true") return;
  button.setAttribute("aria-disabled", "true"); // the disabled attribute would lose keyboard focus
  answer(element("p", "…"));
  try {
    const startedMs = performance.now();
    const response = await fetch(path, options);
    const content = await response.json();
    if (response.ok) answer(...show(content), route(response.headers, performance.now() - startedMs));
    else answer(element("p", content.error ?? `the request failed with status ${response.status}`, { class: "wrong" }));
  } catch (error) {
    answer(element("p", `no response from the service: ${error.message}`, { class: "wrong" }));
  } finally {
    button.removeAttribute("aria-disabled");
  }
}

// The path of the request, from the headers of its response.
function route(headers, tookMs) {
  const worlds = (headers.get("X-Path") ?? "").split(",").filter(Boolean).map(decodeURIComponent);
  const attempts = Number(headers.get("X-Attempts") ?? 1);
  const names = worlds.map((world) => world.replace(/[@:].*$/, ""));
  light(names);
  const line = element("p", "", { class: "route" });
  line.append("Path: ");
  ["frontend", "leader", ...names].forEach((name, at) => line.append(at ? " → " : "", element("code", name)));
  line.append(` in ${tookMs.toFixed(0)} ms`, attempts > 1 ? `, ${attempts} attempts` : "", `, request ${headers.get("X-Request-Id") ?? "without id"}`);
  return line;
}

function showClasses(content) {
  const list = element("ol");
  for (const { label, probability } of content.predictions) {
    const item = element("li");
    const percent = `${(100 * probability).toFixed(1)} %`;
    item.append(element("span", label), element("meter", "", { value: probability, "aria-label": `${label}: ${percent}` }), element("span", percent));
    list.append(item);
  }
  const times = Object.entries(content.timings_ms).filter(([name]) => name !== "total").map(([name, ms]) => `${name} ${ms.toFixed(1)}`);
  return [list, element("p", `${content.timings_ms.total.toFixed(1)} ms in the service: ${times.join(", ")}`)];
}

function showOutputs(content) {
  return content.outputs.map(({ name, datatype, shape, data }) => {
    const values = (data ?? []).flat(Infinity);
    return element("p", `${name}: ${datatype} [${shape.join(", ")}] = ${values.slice(0, MOST_SHOWN).join(", ")}${values.length > MOST_SHOWN ? ", …" : ""}`);
  });
}

$("copy").addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText($("curl").textContent);
    $("copy").textContent = "Copied";
  } catch { // the clipboard needs HTTPS or localhost: select the text instead
    getSelection().selectAllChildren($("curl"));
  }
});
