// Every metric of a run, alone or over those of other runs.

import { address, api, choice, duration, field, figure, h, keepInAddress, later, message, notes, table } from "./ui.js";
import { drawCurves, drawHeat, legendEntry, runColour } from "./charts.js";

const REFRESH = 5000;
const AT_ONCE = 8;
const AXES = [["step", "step"], ["time", "seconds of training"], ["tokens", "trained tokens"]];
const FIRST = ["reward/mean", "eval/", "loss", "accuracy", "groups/equal", "answer_length/mean", "sampled_entropy", "entropy", "ppo_approx_kl",
  "importance_weight", "grad_norm", "staleness/mean", "tokens_per_second", "time/step", "time/wait_for_rollout"];

export async function metricsPage({ content, query, run, alive }) {
  const others = (query.get("with") || "").split(",").filter(Boolean);
  const listed = api("runs").then((answer) => answer.runs);
  const all = others.length ? await listed : [];
  const runs = [run, ...others.map((id) => all.find((one) => one.id === id)).filter(Boolean)];
  const view = { x: query.get("x") || "step", smooth: Number(query.get("smooth") || 0), from: query.get("from"), to: query.get("to") };
  const names = new Set([...run.metrics, ...run.histograms]);
  for (const other of runs.slice(1)) {
    const status = await api(`run/${other.id}`);
    [...status.metrics, ...status.histograms].forEach((name) => names.add(name));
  }
  if (!alive()) return null;
  const histograms = new Set(run.histograms);
  const boxes = new Map();
  const problems = new Map();  // first metric of a rule that found something -> its answer
  const waiting = new Set();
  let revision = run.revision;

  const status = h("span", { class: "muted", id: "status", role: "status" });
  const tell = (one) => {
    const part = one.read < 0.999 ? `, reading the file: ${Math.floor(100 * one.read)} %${one.preview ? " (some of its steps are shown)" : ""}` : "";
    const left = one.seconds_left ? `, ${duration(one.seconds_left)} left` : "";
    status.textContent = `${one.state}, ${one.last_step === null ? "no step yet" : `step ${figure(one.last_step)}`}${left}${part}`;
  };
  tell(run);
  const redraw = () => { for (const name of boxes.keys()) waiting.add(name); pump(); };
  const filter = h("input", { type: "search", placeholder: "metric", "aria-label": "filter metrics", value: query.get("find") || "",
    oninput: later(() => { keepInAddress({ find: filter.value }); arrange(); }, 150) });
  const add = choice([["", "compare with…"]], "",
    (id) => { location.hash = address(["run", run.id, "metrics"], { ...Object.fromEntries(query), with: [...others, id].join(",") }); });
  const reset = h("button", { type: "button", hidden: !view.from, onclick: () => zoom(null, null) }, "Whole run");
  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Metrics"), status, h("span", { class: "grow" }), filter,
      field("over", choice(AXES, view.x, (x) => { Object.assign(view, { x, from: null, to: null }); reset.hidden = true; keepInAddress({ x, from: null, to: null }); redraw(); })),
      field("smoothing", h("input", { type: "range", min: 0, max: 0.2, step: 0.005, value: view.smooth,
        oninput: later((event) => { view.smooth = Number(event.target.value); keepInAddress({ smooth: view.smooth || null }); redraw(); }, 120) })),
      reset, add),
    notes(run.notes) || "",
    runs.length > 1 ? legend(runs, run, others, query) : "",
  );
  listed.then((found) => add.append(...found.filter((one) => !runs.some((r) => r.id === one.id)).map((one) => h("option", { value: one.id }, one.name))), () => {});
  const grid = h("div", { class: "charts" });
  content.append(grid);
  if (!names.size) content.append(message("No step has finished yet. This page fills by itself."));

  function zoom(from, to) {
    Object.assign(view, { from, to });
    reset.hidden = from === null;
    keepInAddress({ from, to });
    redraw();
  }

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const name = entry.target.dataset.metric;
      entry.target.dataset.visible = entry.isIntersecting ? "yes" : "";
      if (entry.isIntersecting && !entry.target.dataset.drawn) waiting.add(name);
    }
    pump();
  }, { rootMargin: "200px" });

  function arrange() {
    const wanted = filter.value.toLowerCase();
    const fitting = ordered([...names]).filter((name) => name.toLowerCase().includes(wanted));
    const shown = [...fitting.filter((name) => problems.has(name)), ...fitting.filter((name) => !problems.has(name))];
    const groups = new Map();
    for (const name of shown) {
      const group = problems.has(name) ? "problems" : groupOf(name);
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(name);
    }
    seen.disconnect();
    grid.replaceChildren(...[...groups].map(([group, members]) => h("section", {},
      h("h2", {}, group, h("span", { class: "muted" }, ` ${members.length}`)),
      h("div", { class: "grid" }, members.map(box)))));
    for (const name of shown) seen.observe(boxes.get(name).card);
    markProblems();
  }

  function markProblems() {
    for (const [name, { card, mark }] of boxes) {
      const found = problems.get(name);
      card.classList.toggle("problem", Boolean(found));
      mark.replaceChildren(...(found ? [h("a", { href: address(["run", run.id, "health"]), title: found.reason }, found.title)] : []));
    }
  }

  function box(name) {
    if (!boxes.has(name)) {
      const value = h("span", { class: "value" });
      const plot = h("div", { class: "plot" });
      const mark = h("span", { class: "mark" });
      const card = h("figure", { class: "chart", "data-metric": name }, h("figcaption", {}, h("span", { class: "name", title: name }, name), mark, value), plot);
      boxes.set(name, { card, plot, mark, value, remove: null });
    }
    return boxes.get(name).card;
  }

  let busy = false;
  async function pump() {
    if (busy) return;
    busy = true;
    try {
      while (waiting.size && alive()) {
        const next = [...waiting].filter((name) => boxes.get(name)?.card.dataset.visible);
        [...waiting].forEach((name) => { if (!next.includes(name)) { waiting.delete(name); if (boxes.get(name)) boxes.get(name).card.dataset.drawn = ""; } });
        const some = next.slice(0, AT_ONCE);
        if (!some.length) break;
        some.forEach((name) => waiting.delete(name));
        await draw(some);
      }
    } catch (error) {
      status.textContent = error.message;
    } finally {
      busy = false;
    }
  }

  async function draw(some) {
    const curves = some.filter((name) => !histograms.has(name));
    const points = Math.min(1200, Math.max(300, 2 * (boxes.get(some[0]).plot.clientWidth || 400)));
    const answer = curves.length ? await api("series", { run: runs.map((one) => one.id), metric: curves, x: view.x, points, smooth: view.smooth, from: view.from, to: view.to }) : { curves: {} };
    if (!alive()) return;
    for (const name of some) {
      const one = boxes.get(name);
      const fresh = h("div", { class: "plot" });
      one.plot.replaceWith(fresh);
      if (one.remove) one.remove();
      one.plot = fresh;
      one.card.dataset.drawn = "yes";
      if (histograms.has(name)) {
        one.remove = drawHeat(fresh, await api(`run/${run.id}/heat`, { metric: name }), (text) => { one.value.textContent = text; });
      } else {
        const drawn = answer.curves[name].map((curve, i) => ({ ...curve, label: runs[i].name }));
        const last = drawn[0].y[drawn[0].y.length - 1];
        const explain = (text) => { one.value.textContent = text ?? figure(last); };
        explain(null);
        one.remove = drawCurves(fresh, drawn, { axis: view.x, sync: "metrics", zoom, explain });
      }
    }
  }

  /** Put the metrics of problems first, and mark them. */
  async function judge() {
    const { answers } = await api(`run/${run.id}/health`);
    if (!alive()) return;
    const before = [...problems.keys()].join();
    problems.clear();
    for (const one of answers.filter(({ light }) => light === "bad" || light === "warning").reverse()) {
      const name = one.metrics[0]?.[0];
      if (names.has(name)) problems.set(name, one);
    }
    if ([...problems.keys()].join() === before) markProblems();
    else arrange();
  }

  arrange();
  judge().catch(() => {});
  document.addEventListener("theme", redraw);
  const timer = setInterval(async () => {
    if (document.hidden) return;
    try {
      const now = await api(`run/${run.id}`);
      if (!alive()) return;
      tell(now);
      if (now.revision !== revision) {
        revision = now.revision;
        const before = names.size;
        now.metrics.forEach((name) => names.add(name));
        now.histograms.forEach((name) => { names.add(name); histograms.add(name); });
        if (names.size !== before) arrange();
        await judge();
        if (!view.from) redraw();
      }
    } catch (error) {
      status.textContent = error.message;
    }
  }, REFRESH);
  return () => { clearInterval(timer); seen.disconnect(); document.removeEventListener("theme", redraw); boxes.forEach((one) => one.remove && one.remove()); };
}

function legend(runs, run, others, query) {
  return h("p", { class: "legend" }, runs.map((one, i) => legendEntry(runColour(i), one.name, i ? h("button", { type: "button", class: "quiet", title: `remove ${one.name}`,
    onclick: () => { location.hash = address(["run", run.id, "metrics"], { ...Object.fromEntries(query), with: others.filter((id) => id !== one.id).join(",") }); } }, "×") : null)));
}

function ordered(names) {
  const place = (name) => { const i = FIRST.findIndex((first) => name.startsWith(first)); return i < 0 ? FIRST.length : i; };
  return names.sort((a, b) => place(a) - place(b) || a.localeCompare(b));
}

function groupOf(name) {
  if (FIRST.some((first) => name.startsWith(first))) return "overview";
  const [head, ...rest] = name.split("/");
  return rest.length ? head : "training";
}
