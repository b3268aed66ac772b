// Two checkpoints side by side: the answers of two steps, of one run or of two, to the same prompts.

import { address, api, choice, field, figure, h, keepInAddress, message } from "./ui.js";

export async function pairsPage({ content, query, run, alive }) {
  const { runs } = await api("runs");
  if (!alive()) return null;
  const sets = run.sampled.sets;
  const state = { of: query.get("of") || sets[0] || "training", left: query.get("left"), right: query.get("right"), other: query.get("other") || run.id, differ: false };
  const said = h("span", { class: "muted", role: "status" });
  const differ = h("input", { type: "checkbox", onchange: () => { state.differ = differ.checked; draw(); } });
  const table = h("div", {}), heads = { left: h("th", { scope: "col" }), right: h("th", { scope: "col" }) };
  const pick = (name) => (value) => { state[name] = value; load(); };
  let shown = null;
  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Side by side"), said, h("span", { class: "grow" }),
      field("answers of", choice([...sets, "training"].map((name) => [name, name]), state.of, (of) => { Object.assign(state, { of, left: null, right: null }); load(); })),
      field("against", choice(runs.map((one) => [one.id, one.id === run.id ? "this run" : one.name]), state.other, (other) => { Object.assign(state, { other, right: null }); load(); })),
      h("label", { class: "field" }, differ, "different rewards only")),
    table);

  async function load() {
    let answer;
    try {
      answer = await api(`run/${run.id}/pairs`, { of: state.of, left: state.left, right: state.right, other: state.other });
    } catch (error) {
      if (alive()) table.replaceChildren(message(error.message));
      return;
    }
    if (!alive()) return;
    shown = answer;
    keepInAddress({ of: state.of, left: answer.left.step, right: answer.right.step, other: state.other === run.id ? null : state.other });
    for (const side of ["left", "right"]) heads[side].replaceChildren(...head(side, answer[side]));
    draw();
  }

  function head(name, side) {
    const owner = name === "left" ? run.name : runs.find((one) => one.id === state.other)?.name;
    const step = h("input", { type: "number", class: "short", min: 0, value: side.step, "aria-label": `step of the ${name} side`, onchange: (event) => pick(name)(event.target.value) });
    const to = (sign, title, target) => h("button", { type: "button", title, "aria-label": `${title}, ${name}`, disabled: target === null, onclick: () => pick(name)(target) }, sign);
    return [h("div", { class: "side" }, h("b", {}, owner), " step ", to("‹", "checkpoint before", side.before), step, to("›", "next checkpoint", side.after),
      h("span", { class: "muted" }, side.reward === null ? "" : `mean reward ${figure(side.reward)}`))];
  }

  function draw() {
    const rows = shown.rows.filter(({ sides: [a, b] }) => !state.differ || a.reward !== b.reward);
    const alone = shown.left.alone + shown.right.alone;
    said.textContent = `${figure(rows.length)} ${rows.length === 1 ? "pair" : "pairs"} of answers${alone ? `; ${figure(alone)} answers without a partner are left out` : ""}`;
    table.replaceChildren(h("table", { class: "pairs" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "prompt"), heads.left, heads.right)),
      h("tbody", {}, rows.map(({ prompt, sides }) => h("tr", {}, h("td", {}, h("div", { class: "cell" }, prompt), sides[0].reference ? h("div", { class: "muted" }, `right: ${sides[0].reference}`) : null),
        ...sides.map((one, i) => answer(one, sides[1 - i], i ? state.other : run.id)))))),
    rows.length ? "" : message(state.differ ? "All answers have the same reward on both sides." : "Both steps have no prompt in common. The prompts of an evaluation are the same in each."));
  }

  function answer(one, other, id) {
    const kind = one.reward > other.reward ? "best" : one.reward < other.reward ? "worst" : "";
    return h("td", {}, h("div", {}, h("span", { class: `tag ${kind}` }, `reward ${figure(one.reward)}`),
      h("a", { class: "muted", href: address(["run", id, "samples"], { first_step: one.step, last_step: one.step, of: state.of, at: one.at }) }, ` ${figure(one.answer_tokens)} tokens${one.finish_reason === "length" ? ", cut off" : ""}`)),
    h("pre", { class: "text" }, one.answer));
  }

  await load();
  return null;
}
