// One step explained: its loss, and the tokens that moved it most.

import { address, api, choice, facts, figure, h, keepInAddress, message, percent, table } from "./ui.js";

export async function explainPage({ content, query, run, alive, studio }) {
  const { steps } = await api(`run/${run.id}/saved`);
  const result = h("div", {});
  content.append(h("div", { class: "bar" }, h("h1", {}, "Explain a step"),
    steps.length ? choice(steps.map((step) => [String(step), `step ${step}`]), query.get("step") || String(steps[steps.length - 1]), explain, { "aria-label": "step" }) : null), result);
  if (!steps.length) {
    result.append(message("This run saved no batch. With monitor.save_batches=N it saves that of every N-th step, and this page computes its loss and the gradient of each token."),
      h("p", {}, "What the metrics of this run say: ", h("a", { href: address(["run", run.id, "health"]) }, "Health"), "."));
    return null;
  }
  if (!studio.may_run) {
    result.append(message("The studio computes nothing unless it was started with --allow-run. The same figures in a terminal:"),
      h("pre", { class: "text" }, `python -m tools.loss --from-run ${run.logs} --step ${steps[steps.length - 1]}`));
    return null;
  }

  async function explain(step) {
    result.replaceChildren(message("Computing…"));
    let answer;
    try {
      answer = await api(`run/${run.id}/explain`, {}, { step });
    } catch (error) {
      if (alive()) result.replaceChildren(message(error.message, "error"));
      return;
    }
    if (!alive()) return;
    keepInAddress({ step });
    const share = (value) => percent(value / (answer.total || 1));
    const size = (one) => one.grads.reduce((sum, value) => sum + Math.abs(value), 0);
    const most = Math.max(...answer.moved.map((one) => Math.abs(one.grad)), 1e-30);
    const open = (one) => one.episode
      ? h("a", { href: address(["run", run.id, "samples"], { first_step: step, last_step: step, episode: one.episode }) }, `answer ${one.index}`) : "–";
    const bars = (one) => h("span", { class: "bars" }, one.grads.slice(0, 400).map((value, i) => {
      const bar = h("i", { class: value > 0 ? "down" : "up", title: `token ${i}: gradient ${figure(value)}, log-probability ${figure(one.logprobs[i])}` });
      bar.style.opacity = 0.08 + 0.92 * Math.abs(value) / most;
      return bar;
    }));
    const advantage = (one) => figure(Array.isArray(one.advantage) ? one.advantage.find((value) => value !== 0) ?? 0 : one.advantage);
    result.replaceChildren(
      facts([["loss", answer.loss], ["algorithm", answer.algorithm || "own settings"], ...Object.entries(answer.metrics)].map(([name, value]) => [name, figure(value)])),
      h("h2", {}, "Tokens that moved the loss most"),
      !answer.moved.length ? message("No token moves it: every gradient is 0.") : table([
        { title: "share", align: "right", cell: (one) => share(Math.abs(one.grad)) },
        { title: "token", cell: (one) => h("code", { class: "around" }, one.before, h("mark", { class: one.grad > 0 ? "down" : "up" }, one.text || `token ${one.place}`), one.after) },
        { title: "the update makes it", cell: (one) => (one.grad > 0 ? "less likely" : "more likely") },
        { title: "log-probability", align: "right", cell: (one) => figure(one.logprob) },
        { title: "advantage", align: "right", cell: (one) => figure(one.advantage) },
        { title: "reward", align: "right", cell: (one) => figure(one.reward) },
        { title: "", cell: open },
      ], answer.moved),
      h("h2", {}, "Answers"),
      h("p", { class: "muted" }, "Each mark is a token: its colour shows whether the update makes it more likely (green) or less (red), its strength how much it moves the loss."),
      table([
        { title: "share", align: "right", cell: (one) => share(size(one)) },
        { title: "reward", align: "right", cell: (one) => figure(one.reward) },
        { title: "group", align: "right", cell: (one) => figure(one.group) },
        { title: "advantage", align: "right", cell: advantage },
        { title: "tokens", cell: bars },
        { title: "", cell: open },
      ], answer.sequences),
      answer.left_out ? message(`${figure(answer.left_out)} sequences with smaller gradients are left out.`) : "");
  }
  await explain(query.get("step") || String(steps[steps.length - 1]));
  return null;
}
