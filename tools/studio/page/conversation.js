// An answer as a conversation: turns, calls of tools and their results; the branches of a rollout as a tree.

import { figure, h } from "./ui.js";

const PARTS = /<(tool_call|tool_response)>([\s\S]*?)<\/\1>/g;

/** Return the turns of an answer. With `group`, turns that other branches of its rollout share stand once, and the rest
 * of each branch below them. `open(at)` shows the answer of a branch. */
export function conversation(sample, group, open) {
  const branches = sample.rollout === null || sample.rollout === undefined ? [] : group.filter((one) => one.rollout === sample.rollout);
  if (branches.length < 2) return turnsOf(sample).map(turn);
  const root = { next: [], answers: branches };
  for (const one of branches) {
    let node = root;
    for (const said of [{ by: "prompt", text: one.prompt }, ...turnsOf(one)]) {
      let following = node.next.find((other) => other.said.by === said.by && other.said.text === said.text);
      if (!following) node.next.push(following = { said, next: [], answers: [] });
      following.answers.push(one);
      node = following;
    }
  }
  const first = root.next.length === 1 ? root.next[0] : root;  // the prompt stands above
  return [h("p", { class: "muted" }, `${branches.length} branches of one rollout`), ...below(first, sample, open)];
}

function below(node, sample, open) {
  if (node.next.length === 1) return [turn(node.next[0].said), ...below(node.next[0], sample, open)];
  return node.next.map((branch) => {
    const [first] = branch.answers, here = branch.answers.some((one) => one.at === sample.at);
    const name = branch.answers.length > 1 ? `${branch.answers.length} branches` : `branch ${first.index}: reward ${figure(first.reward)}`;
    return h("details", { class: `branch ${here ? "chosen" : ""}`, open: here }, h("summary", {}, name,
      here ? null : h("button", { type: "button", class: "quiet", onclick: () => open(first.at) }, "show")),
    turn(branch.said), ...below(branch, sample, open));
  });
}

function turnsOf(sample) {
  return sample.turns && sample.turns.length ? sample.turns : [{ by: "model", text: sample.answer }];
}

function turn({ by, text }) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(PARTS)) {
    parts.push(plain(text.slice(end, found.index)), found[1] === "tool_call" ? call(found[2]) : result(found[2]));
    end = found.index + found[0].length;
  }
  parts.push(plain(text.slice(end)));
  return h("div", { class: `turn ${by}` }, h("span", { class: "by" }, by), ...parts.filter(Boolean));
}

function plain(text) {
  return text.trim() ? h("pre", { class: "text answer" }, text) : null;
}

function call(text) {
  let name = "a tool", given = text.trim();
  try {
    const read = JSON.parse(text);
    name = String(read.name);
    given = JSON.stringify(read.arguments ?? {});
  } catch { /* another form of calls: shown as it is */ }
  return h("p", { class: "tool" }, "calls ", h("b", {}, name), " ", h("code", {}, given));
}

function result(text) {
  return h("p", { class: "tool" }, "result ", h("code", {}, text.trim()));
}
