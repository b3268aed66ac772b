// One step explained: its loss, and the tokens that moved it most.

import { api, choice, facts, figure, h, message, table } from "./ui.js";

export async function explainPage({ content, query, run, alive, studio }) {
  const { steps } = await api(`run/${run.id}/saved`);
  const result = h("div", {});
  content.append(h("div", { class: "bar" }, h("h1", {}, "Explain a step"),
    steps.length ? choice([["", "step…"], ...steps.map((step) => [String(step), `step ${step}`])], query.get("step") || "", explain, { "aria-label": "step" }) : null), result);
  if (!steps.length) {
    result.append(message("This run saved no batch. With monitor.save_batches=N it saves that of every N-th step, and this page computes its loss and the gradient of each token."));
    return null;
  }
  if (!studio.may_run) {
    result.append(message("The studio computes nothing unless it was started with --allow-run. The same figures in a terminal:"),
      h("pre", { class: "text" }, `python -m tools.loss --from-run ${run.logs} --step ${steps[steps.length - 1]}`));
    return null;
  }
  result.append(message("Choose a step."));

  async function explain(step) {
    if (!step) return;
    result.replaceChildren(message("Computing…"));
    let answer;
    try {
      answer = await api(`run/${run.id}/explain`, {}, { step });
    } catch (error) {
      if (alive()) result.replaceChildren(message(error.message, "error"));
      return;
    }
    if (!alive()) return;
    const size = (one) => one.grads.reduce((sum, value) => sum + Math.abs(value), 0);
    const total = answer.sequences.reduce((sum, one) => sum + size(one), 0) || 1;
    const most = Math.max(...answer.sequences.flatMap((one) => one.grads.map(Math.abs)), 1e-30);
    const bars = (one) => h("span", { class: "bars" }, one.grads.slice(0, 400).map((value, i) => {
      const bar = h("i", { class: value > 0 ? "down" : "up", title: `token ${i}: gradient ${figure(value)}, log-probability ${figure(one.logprobs[i])}` });
      bar.style.opacity = 0.08 + 0.92 * Math.abs(value) / most;
      return bar;
    }));
    result.replaceChildren(
      facts([["loss", answer.loss], ["algorithm", answer.algorithm || "own settings"], ...Object.entries(answer.metrics)].map(([name, value]) => [name, figure(value)])),
      h("p", { class: "muted" }, "Each mark is a token: its colour shows whether the update makes it more likely (green) or less (red), its strength how much it moves the loss."),
      table([
        { title: "share", align: "right", cell: (one) => `${figure(100 * size(one) / total)} %` },
        { title: "reward", align: "right", cell: (one) => figure(one.reward) },
        { title: "group", align: "right", cell: (one) => figure(one.group) },
        { title: "advantage", align: "right", cell: (one) => figure(Array.isArray(one.advantage) ? one.advantage.find((value) => value !== 0) ?? 0 : one.advantage) },
        { title: "tokens", cell: bars },
      ], answer.sequences),
      answer.left_out ? message(`${figure(answer.left_out)} sequences with smaller gradients are left out.`) : "");
  }
  if (query.get("step")) await explain(query.get("step"));
  return null;
}
