// Elements, requests, addresses and figures. Text reaches the page as text nodes alone, never as markup.

/** Return an element. Properties that begin with "on" are listeners, `class` and `data-...` attributes; children are
 * elements or text. */
export function h(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-") && !tag.startsWith("svg:") && name !== "list") element[name] = value;
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return the answer to a request; throw an Error with the server's sentence. */
export async function api(path, parameters = {}, body = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null && one !== "") query.append(name, one);
    }
  }
  const text = query.toString();
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  };
  let response;
  try {
    response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, options);
  } catch {
    throw new Error("The studio does not answer: it has ended, or the connection is lost.");
  }
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error || `error ${response.status}`);
  return answer;
}

/** Return the place that the address names: {parts, query}. */
export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query || "") };
}

/** Return the address of a page. */
export function address(parts, query = {}) {
  const path = parts.map(encodeURIComponent).join("/");
  const text = new URLSearchParams(Object.entries(query).filter(([, v]) => v !== "" && v !== null && v !== undefined)).toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** Change the query of the present address without a new page; null removes a name. */
export function keepInAddress(changes) {
  const { parts, query } = place();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") query.delete(name);
    else query.set(name, value);
  }
  history.replaceState(null, "", address(parts, Object.fromEntries(query)));
}

/** Return a number with four significant digits. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e15) return value.toExponential(2);
  if (size >= 1e6) return compact(value);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

/** Return a share of 1 in percent, with two significant digits. */
export function percent(share) {
  return `${figure(Number((100 * share).toPrecision(2)))} %`;
}

/** Return a large number in few characters: 12.8M. */
export function compact(value) {
  return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** Return seconds in words. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const i = units.findIndex(([size]) => seconds >= size);
  if (i >= 0 && i < 3) {
    const [[size, name], [part, partName]] = units.slice(i);
    const more = Math.floor((seconds % size) / part);
    return `${Math.floor(seconds / size)} ${name}${more ? ` ${more} ${partName}` : ""}`;
  }
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  return seconds >= 1 || seconds === 0 ? `${Number(seconds.toFixed(1))} s` : `${(seconds * 1000).toFixed(0)} ms`;
}

/** Return a list of names with their values: [name, value] pairs. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
}

/** Call a function every `wait` milliseconds while the page is visible; return what ends it. Its errors are left out. */
export function every(wait, run) {
  const timer = setInterval(() => document.hidden || run().catch(() => {}), wait);
  return () => clearInterval(timer);
}

/** Return a label around a control. */
export function field(label, control) {
  return h("label", { class: "field" }, h("span", {}, label), control);
}

/** Return a choice. `options`: [value, text] pairs. */
export function choice(options, value, onchange, properties = {}) {
  return h("select", { ...properties, onchange: (event) => onchange(event.target.value) },
    options.map(([name, text]) => h("option", { value: name, selected: name === value }, text)));
}

/** Return what is shown where there is nothing, or an error. */
export function message(text, kind = "empty") {
  return h("p", { class: kind, role: kind === "error" ? "alert" : "status" }, text);
}

/** Show elements over the page until they are closed. */
export function dialog(title, ...children) {
  const box = h("dialog", { onclose: () => box.remove() },
    h("header", { class: "bar" }, h("h2", {}, title), h("span", { class: "grow" }), h("button", { type: "button", onclick: () => box.close() }, "Close")),
    ...children);
  document.body.append(box);
  box.showModal();
}

/** Call a function once, `wait` milliseconds after the last request for it. */
export function later(run, wait = 250) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...given), wait);
  };
}

/** Return a table. `columns`: {title, cell(row), align, sort}. */
export function table(columns, rows, properties = {}) {
  const head = h("tr", {}, columns.map((column) => h("th", { class: column.align || "", scope: "col" }, column.head || column.title)));
  const body = rows.map((row) => h("tr", properties.row ? properties.row(row) : {},
    columns.map((column) => h("td", { class: column.align || "" }, column.cell(row)))));
  return h("table", { class: properties.class || "" }, h("thead", {}, head), h("tbody", {}, body));
}

/** Return the keys that differ between two configurations as a table. */
export async function configurations(name, text, otherName, otherText) {
  const { rows } = await api("configure/compare", {}, { first: text, second: otherText });
  return rows.length ? table([{ title: "key", cell: (one) => h("code", {}, one.key) }, { title: name, cell: (one) => one.first ?? "–" },
    { title: otherName, cell: (one) => one.second ?? "–" }], rows) : message("Both set the same keys to the same values.");
}

/** Return the notes on damaged files as one line. */
export function notes(texts) {
  return texts && texts.length ? h("p", { class: "note", role: "note" }, texts.join(" · ")) : null;
}
