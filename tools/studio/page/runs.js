// The list of runs.

import { address, api, configurations, dialog, duration, every, figure, h, message, table } from "./ui.js";

const REFRESH = 5000;

export async function runsPage({ content, alive }) {
  const chosen = new Set();
  const list = h("div", {});
  let runs = [];
  const hint = h("span", { class: "muted", role: "status" });
  const compare = h("button", { type: "button",
    onclick: () => { const [first, ...others] = chosen; location.hash = address(["run", first, "metrics"], { with: others.join(",") }); },
  }, "Compare curves");
  const differ = h("button", { type: "button", onclick: async () => {
    const [first, second] = [...chosen].map((id) => runs.find((run) => run.id === id));
    try {
      const [one, other] = await Promise.all([first, second].map((run) => api(`run/${run.id}/config`)));
      dialog(`Configurations of ${first.name} and ${second.name}`, await configurations(first.name, one.text, second.name, other.text));
    } catch (error) { hint.textContent = error.message; }
  } }, "Compare configurations");
  content.append(h("div", { class: "bar" }, h("h1", {}, "Runs"), h("span", { class: "grow" }), hint, differ, compare), list);

  const update = () => {
    compare.disabled = chosen.size < 2;
    differ.disabled = chosen.size !== 2;
    hint.textContent = chosen.size < 2 ? "tick two runs to compare" : "";
  };
  const columns = [
    { title: "", cell: (run) => h("input", {
      type: "checkbox", checked: chosen.has(run.id), "aria-label": `choose ${run.name}`,
      onchange: (event) => { event.target.checked ? chosen.add(run.id) : chosen.delete(run.id); update(); } }) },
    { title: "run", cell: (run) => h("a", { href: address(["run", run.id, "metrics"]), title: run.logs }, run.name) },
    { title: "state", cell: (run) => h("span", { class: `state ${run.state}` }, run.state) },
    { title: "health", cell: (run) => h("a", { class: `light ${run.light?.light ?? ""}`, href: address(["run", run.id, "health"]), title: hasProblem(run) ? run.light.reason : "no problem found" },
      run.light ? [h("span", { class: "dot" }), run.light.light] : "open") },
    { title: "step", align: "right", cell: (run) => figure(run.step) },
    { title: "reward or loss", align: "right", cell: (run) => run.reward === null ? "–" : [h("span", { class: "muted" }, `${run.measure} `), figure(run.reward)] },
    { title: "tokens/s", align: "right", cell: (run) => figure(run.tokens_per_second) },
    { title: "staleness", align: "right", cell: (run) => figure(run.staleness) },
    { title: "time left", align: "right", cell: (run) => duration(run.seconds_left) },
    { title: "last warning", cell: (run) => { const text = run.warning || (hasProblem(run) ? run.light.title : ""); return h("span", { class: "cut", title: text }, text); } },
  ];
  const refresh = async () => {
    ({ runs } = await api("runs"));
    if (!alive()) return;
    list.replaceChildren(runs.length ? table(columns, runs)
      : message("No run in these folders yet. Start one, or give the studio the fileroot of your runs."));
  };
  update();
  await refresh();
  return every(REFRESH, refresh);
}

function hasProblem(run) {
  return run.light?.light === "bad" || run.light?.light === "warning";
}
