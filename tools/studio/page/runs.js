// The list of runs.

import { address, api, duration, every, figure, h, message, table } from "./ui.js";

const REFRESH = 5000;

export async function runsPage({ content, alive }) {
  const chosen = new Set();
  const list = h("div", {});
  const compare = h("button", {
    type: "button", disabled: true,
    onclick: () => { const [first, ...others] = chosen; location.hash = address(["run", first, "metrics"], { with: others.join(",") }); },
  }, "Compare");
  const differ = h("button", {
    type: "button", disabled: true,
    onclick: () => { const [run, against] = chosen; location.hash = address(["configure"], { run, against }); },
  }, "Compare configurations");
  content.append(h("div", { class: "bar" }, h("h1", {}, "Runs"), h("span", { class: "grow" }), differ, compare), list);

  const update = () => {
    compare.disabled = chosen.size < 2;
    differ.disabled = chosen.size !== 2;
    compare.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare: choose two runs";
  };
  const columns = [
    { title: "", cell: (run) => h("input", {
      type: "checkbox", checked: chosen.has(run.id), "aria-label": `choose ${run.name}`,
      onchange: (event) => { event.target.checked ? chosen.add(run.id) : chosen.delete(run.id); update(); } }) },
    { title: "run", cell: (run) => h("a", { href: address(["run", run.id, "metrics"]), title: run.logs }, run.name) },
    { title: "state", cell: (run) => h("span", { class: `state ${run.state}` }, run.state) },
    { title: "health", cell: (run) => run.light ? h("a", { class: `light ${run.light.light}`, href: address(["run", run.id, "health"]), title: run.light.reason || "nothing found" },
      h("span", { class: "dot" }), run.light.light) : "–" },
    { title: "step", align: "right", cell: (run) => figure(run.step) },
    { title: "reward or loss", align: "right", cell: (run) => figure(run.reward) },
    { title: "tokens/s", align: "right", cell: (run) => figure(run.tokens_per_second) },
    { title: "staleness", align: "right", cell: (run) => figure(run.staleness) },
    { title: "time left", align: "right", cell: (run) => duration(run.seconds_left) },
    { title: "last warning", cell: (run) => h("span", { class: "cut", title: run.warning }, run.warning) },
  ];
  const refresh = async () => {
    const { runs } = await api("runs");
    if (!alive()) return;
    list.replaceChildren(runs.length ? table(columns, runs)
      : message("No run in these folders yet. Start one, or give the studio the fileroot of your runs."));
  };
  update();
  await refresh();
  return every(REFRESH, refresh);
}
