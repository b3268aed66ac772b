// What is wrong with a run, in words, and what is not.

import { address, api, every, figure, h } from "./ui.js";

export async function healthPage({ content, run, alive }) {
  const list = h("div", { class: "lights" });
  const sum = h("span", { class: "muted", role: "status" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Health"), sum), list);
  const refresh = async () => {
    const { answers } = await api(`run/${run.id}/health`);
    if (!alive()) return;
    const wrong = answers.filter((one) => one.light === "bad" || one.light === "warning").length;
    const asked = answers.filter((one) => one.light !== "unknown").length;
    sum.textContent = wrong ? `${wrong} of ${asked} rules found something` : `nothing found by ${asked} rules`;
    list.replaceChildren(...answers.map((one) => h("article", { class: `light ${one.light}` },
      h("span", { class: "dot", "aria-hidden": "true" }),
      h("div", {},
        h("h3", {}, one.title, h("span", { class: "muted" }, ` ${one.light}`)),
        one.reason ? h("p", {}, one.reason) : null,
        h("p", { class: "links" },
          one.metrics.map((name) => h("a", { href: address(["run", run.id, "metrics"], { find: name }) }, name)),
          h("a", { href: `/docs/${one.docs}`, target: "_blank", rel: "noreferrer" }, `${one.reason && one.light !== "unknown" ? "what to do: " : ""}docs/${one.docs}`))),
      h("b", { class: "figure" }, one.figure === null ? "" : figure(one.figure)))));
  };
  await refresh();
  return every(5000, refresh);
}
