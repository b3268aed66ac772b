// The problems of a run, in words, and what was checked without finding one.

import { address, api, dialog, every, figure, h, message, percent } from "./ui.js";

const GROUPS = [
  ["found", "Problems", ({ light }) => light === "bad" || light === "warning"],
  ["good", "No problem found", ({ light }) => light === "good"],
  ["unknown", "Not judged", ({ light }) => light === "unknown"],
];

export async function healthPage({ content, run, alive }) {
  const list = h("div", {});
  const sum = h("span", { class: "muted", role: "status" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Health"), sum), list);
  const refresh = async () => {
    const { answers } = await api(`run/${run.id}/health`);
    if (!alive()) return;
    const number = (light) => answers.filter((one) => one.light === light).length;
    sum.textContent = `${number("bad")} bad, ${number("warning")} ${number("warning") === 1 ? "warning" : "warnings"}, ${number("good")} good, ${number("unknown")} not judged`;
    list.replaceChildren(...GROUPS.flatMap(([name, title, belongs]) => {
      const members = answers.filter(belongs);
      return members.length ? [h("h2", {}, title), h("div", { class: `lights ${name}` }, members.map((one) => card(one, run)))] : [];
    }));
  };
  await refresh();
  return every(5000, refresh);
}

function card(one, run) {
  const shown = (value) => (one.is_share ? percent(value) : figure(value));
  const isOne = one.metrics.length === 1;
  return h("article", { class: `light ${one.light}` },
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("div", {},
      h("h3", {}, one.title, h("span", { class: "muted" }, one.light === "unknown" ? "" : ` ${one.light}${one.since === null ? "" : `, since step ${figure(one.since)}`}`)),
      one.reason ? h("p", {}, one.reason) : null,
      one.actions.length ? h("div", { class: "actions" }, "What to do:", h("ul", {}, one.actions.map((action) => h("li", {}, action)))) : null,
      h("p", { class: "links" },
        one.metrics.map(([name, value]) => h("span", {},
          h("a", { href: address(["run", run.id, "metrics"], { find: name }) }, name), value === null ? "" : ` ${isOne ? shown(value) : figure(value)}`)),
        one.docs ? h("button", { type: "button", class: "quiet", onclick: () => explain(one) }, "documentation") : null)),
    one.figure === null || one.light === "unknown" ? null : h("b", { class: "figure" }, shown(one.figure)));
}

/** Show the section of the documentation that a rule names. */
async function explain({ title, docs, actions }) {
  const [page, section] = docs.split("#");
  const answer = await fetch(`/docs/${encodeURIComponent(page)}`);
  const text = await answer.text();
  dialog(title,
    h("ul", {}, actions.map((action) => h("li", {}, action))),
    h("p", { class: "muted" }, h("a", { href: `/docs/${docs}`, target: "_blank" }, `docs/${docs}`)),
    answer.ok ? h("div", { class: "document" }, sectionOf(text, section, answer.url)) : message(text));
}

/** Return the elements of a section and the sections below it; those of the whole page without such a section. The
 * page is one of the documentation, which the server has rendered. */
function sectionOf(text, name, url) {
  const main = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  for (const link of main.querySelectorAll("a")) {
    link.href = new URL(link.getAttribute("href"), url).href;
    link.target = "_blank";
  }
  const elements = [...main.children];
  const level = (element) => Number(/^H([1-6])$/.exec(element.tagName)?.[1] ?? 9);
  const first = elements.findIndex((element) => element.id === name);
  if (first < 0) return elements;
  const next = elements.findIndex((element, i) => i > first && level(element) <= level(elements[first]));
  return elements.slice(first, next < 0 ? undefined : next);
}
