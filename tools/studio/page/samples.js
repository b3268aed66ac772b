// Answers: a table with filters, and one answer with its group.

import { address, api, choice, field, figure, h, keepInAddress, later, message, notes, place } from "./ui.js";

const FILTERS = ["text", "first_step", "last_step", "least_reward", "most_reward", "finish", "notable", "of", "sort", "order"];
const PAGE = 50;

export async function samplesPage({ content, query, run, alive }) {
  const given = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) || ""]));
  let rows = [], next = null, chosen = -1, latest = 0;
  const count = h("span", { class: "muted", role: "status", id: "count" });
  const body = h("tbody", {});
  const detail = h("aside", { class: "detail", "aria-live": "polite" });
  const more = h("button", { type: "button", hidden: true, onclick: () => load(next) }, "More");
  const change = (name) => (value) => { given[name] = value; keepInAddress({ [name]: value, at: null }); load(0); };
  const typed = (name, properties) => h("input", { ...properties, value: given[name], oninput: later((event) => change(name)(event.target.value), 250) });
  const sets = run.sampled.sets;
  const heads = [["step", "step"], ["reward", "reward"], ["answer_tokens", "tokens"]].map(([name, title]) =>
    h("th", { class: "right", scope: "col", "aria-sort": "none", "data-sort": name }, h("button", { type: "button", class: "quiet", onclick: () => {
      given.order = (given.sort || "step") === name && given.order !== "up" ? "up" : "down";
      given.sort = name;
      keepInAddress({ sort: name, order: given.order });
      load(0);
    } }, title)));

  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Samples"), count),
    notes(run.sampled.notes) || "",
    h("div", { class: "filters" },
      typed("text", { type: "search", placeholder: "search texts", "aria-label": "search" }),
      field("step from", typed("first_step", { type: "number", min: 0, class: "short" })), field("to", typed("last_step", { type: "number", min: 0, class: "short" })),
      field("reward from", typed("least_reward", { type: "number", step: "any", class: "short" })), field("to", typed("most_reward", { type: "number", step: "any", class: "short" })),
      field("end", choice([["", "any"], ["stop", "stopped"], ["length", "cut off"], ["abort", "aborted"]], given.finish, change("finish"))),
      field("only", choice([["", "all"], ["best", "best"], ["worst", "worst"], ["longest", "longest"]], given.notable, change("notable"))),
      field("of", choice([["", "all"], ["training", "training"], ["evaluation", "evaluation"], ...sets.map((name) => [name, name])], given.of, change("of"))),
    ),
    h("div", { class: "split" },
      h("div", { class: "scroll" }, h("table", { class: "samples" }, h("thead", {}, h("tr", {}, heads, h("th", {}, "prompt"), h("th", {}, "answer"))), body), more),
      detail),
  );
  if (!run.sampled.samples && run.sampled.read >= 1) detail.append(message("This run has no samples (samples.share=0), or no step has finished yet."));
  else detail.append(message("Choose an answer. Keys: j and k."));

  async function load(start) {
    const mine = ++latest;
    more.disabled = true;
    let answer;
    try {
      answer = await api(`run/${run.id}/samples`, { ...given, start, count: PAGE });
    } catch (error) {
      if (alive() && mine === latest) count.textContent = error.message;
      return;
    }
    if (!alive() || mine !== latest) return;
    if (!start) { rows = []; chosen = -1; body.replaceChildren(); }
    rows.push(...answer.rows);
    body.append(...answer.rows.map(line));
    next = answer.next;
    more.hidden = next === null;
    more.disabled = false;
    more.textContent = given.text ? "Search on" : "More";
    const read = answer.read < 0.999 ? `; reading the files: ${Math.floor(100 * answer.read)} %` : "";
    count.textContent = given.text
      ? `${figure(rows.length)} found in ${figure(answer.looked_at)} of ${figure(answer.matched)} answers${read}`
      : `${figure(answer.matched)} of ${figure(answer.samples)} answers${read}`;
    for (const head of heads) head.setAttribute("aria-sort", (given.sort || "step") === head.dataset.sort ? (given.order === "up" ? "ascending" : "descending") : "none");
    const wanted = place().query.get("at");
    if (!start && wanted) open(wanted);
    else if (given.text && next !== null && rows.length < PAGE) load(next);
    if (answer.read < 0.999) setTimeout(() => alive() && mine === latest && load(0), 2000);
  }

  function line(row) {
    const element = h("tr", { tabIndex: 0, "data-at": row.at,
      onclick: () => open(row.at),
      onkeydown: (event) => { if (event.key === "Enter") open(row.at); } },
      h("td", { class: "right" }, figure(row.step)),
      h("td", { class: "right" }, figure(row.reward)),
      h("td", { class: `right ${row.finish_reason === "length" ? "warn" : ""}`, title: row.finish_reason }, figure(row.answer_tokens)),
      h("td", {}, h("div", { class: "cell" }, row.prompt)),
      h("td", {}, h("div", { class: "cell" }, tags(row), row.answer)));
    return element;
  }

  async function open(at) {
    chosen = rows.findIndex((row) => row.at === at);
    body.querySelectorAll("tr").forEach((row) => row.classList.toggle("chosen", row.dataset.at === at));
    keepInAddress({ at });
    let sample;
    try {
      sample = await api(`run/${run.id}/sample`, { at });
    } catch (error) {
      detail.replaceChildren(message(error.message, "error"));
      return;
    }
    if (alive()) detail.replaceChildren(...whole(sample, run, open));
  }

  const move = (event) => {
    if (event.target.closest("input, textarea, select") || (event.key !== "j" && event.key !== "k") || !rows.length) return;
    const at = Math.min(rows.length - 1, Math.max(0, chosen + (event.key === "j" ? 1 : -1)));
    open(rows[at].at);
    body.children[at].scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("keydown", move);
  await load(0);
  return () => document.removeEventListener("keydown", move);
}

function tags(row) {
  const names = [...(row.notable || []), ...(row.evaluation ? [row.evaluation] : [])];
  return names.length ? h("span", { class: "tags" }, names.map((name) => h("span", { class: `tag ${name}` }, name))) : null;
}

function whole(sample, run, open) {
  const versions = sample.oldest_version === sample.newest_version ? sample.oldest_version : `${sample.oldest_version} to ${sample.newest_version}`;
  const facts = [["reward", figure(sample.reward)], ["tokens", figure(sample.answer_tokens)], ["end", sample.finish_reason],
    ["weights", versions], ["step", figure(sample.step)], ["prompt id", sample.query_id], ["answer", sample.index],
    ...Object.entries(sample.metrics || {}).map(([name, value]) => [name, figure(value)])];
  return [
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value))))),
    tags(sample),
    h("h3", {}, "Prompt"), h("pre", { class: "text" }, sample.prompt),
    h("h3", {}, "Answer"),
    ...(sample.turns && sample.turns.length
      ? sample.turns.map((turn) => h("div", { class: `turn ${turn.by}` }, h("span", { class: "by" }, turn.by), h("pre", { class: "text" }, turn.text)))
      : [h("pre", { class: "text answer" }, sample.answer)]),
    ...(sample.reference ? [h("h3", {}, "Right answer"), h("pre", { class: "text reference" }, sample.reference)] : []),
    ...(sample.group.length > 1 ? [h("h3", {}, `Group: ${sample.group.length} answers to this prompt`), group(sample, open)] : []),
  ].filter(Boolean);
}

function group(sample, open) {
  return h("div", { class: "group" }, sample.group.map((one) => h("article", { class: one.at === sample.at ? "chosen" : "", tabIndex: 0,
    onclick: () => open(one.at), onkeydown: (event) => { if (event.key === "Enter") open(one.at); } },
    h("header", {}, h("b", {}, figure(one.reward)), ` ${figure(one.answer_tokens)} tokens${one.finish_reason === "length" ? ", cut off" : ""}`),
    h("pre", { class: "text" }, one.answer))));
}
