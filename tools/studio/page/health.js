// What is wrong with a run, in words, and what is not.

import { address, api, dialog, every, figure, h } from "./ui.js";

const GROUPS = [
  ["found", "Found", ({ light }) => light === "bad" || light === "warning"],
  ["good", "Nothing found", ({ light }) => light === "good"],
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
  return h("article", { class: `light ${one.light}` },
    h("span", { class: "dot", "aria-hidden": "true" }),
    h("div", {},
      h("h3", {}, one.title, h("span", { class: "muted" }, ` ${one.light === "unknown" ? "" : one.light}`)),
      one.reason ? h("p", {}, one.reason) : null,
      h("p", { class: "links" },
        one.metrics.map(([name, value]) => h("span", {},
          h("a", { href: address(["run", run.id, "metrics"], { find: name }) }, name), value === null ? "" : ` ${figure(value)}`)),
        one.docs ? h("button", { type: "button", class: "quiet", onclick: () => explain(one) }, one.light === "good" ? "documentation" : "what to do") : null)),
    one.figure === null || one.light === "unknown" ? null : h("b", { class: "figure" }, figure(one.figure)));
}

/** Show the section of the documentation that a rule names. */
async function explain({ title, docs }) {
  const [page, section] = docs.split("#");
  const answer = await fetch(`/docs/${encodeURIComponent(page)}`);
  const text = answer.ok ? sectionOf(await answer.text(), section) : await answer.text();
  dialog(title, h("p", { class: "muted" }, `docs/${docs}`), h("pre", { class: "text" }, text));
}

/** Return a section of a page with its title and the sections below it; the whole page without such a section. */
function sectionOf(text, name) {
  const titles = [...text.matchAll(/^(#+) (.*)$/gm)];
  const slug = (title) => title.toLowerCase().replace(/[^\w -]/g, "").trim().replaceAll(" ", "-");
  const first = titles.findIndex((one) => slug(one[2]) === name);
  if (first < 0) return text;
  const next = titles.slice(first + 1).find((one) => one[1].length <= titles[first][1].length);
  return text.slice(titles[first].index, next?.index).trim();
}
