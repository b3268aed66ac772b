// Answers: a table with filters, and one answer with its group.

import { api, choice, facts, field, figure, h, keepInAddress, later, message, notes, place } from "./ui.js";
import { conversation } from "./conversation.js";
import { byToken } from "./tokens.js";

const FILTERS = ["text", "first_step", "last_step", "least_reward", "most_reward", "least_version", "most_version", "finish", "notable", "of", "task", "episode", "sort", "order"];
const ENDS = { stop: "stopped", length: "cut off", abort: "aborted" };
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
  const between = (low, high, placeholder) => h("input", { type: "text", class: "range", placeholder, value: asRange(given[low], given[high]),
    title: "a number, or a range: 7, 5 to 9, 5 to, to 9",
    oninput: later((event) => {
      const range = rangeOf(event.target.value);
      event.target.setAttribute("aria-invalid", String(range === null));
      if (!range) return;
      [given[low], given[high]] = range;
      keepInAddress({ [low]: range[0], [high]: range[1], at: null });
      load(0);
    }, 250) });
  const sets = run.sampled.sets;
  const noted = new Map((await api(`run/${run.id}/notes`)).notes.map((note) => [keyOf(note), note]));
  const save = h("a", { class: "button", download: "samples.jsonl" }, "Export jsonl");
  const heads = [["step", "step"], ["reward", "reward"], ["answer_tokens", "tokens"], ["oldest_version", "version"]].map(([name, title]) =>
    h("th", { class: "right", scope: "col", "aria-sort": "none", "data-sort": name }, h("button", { type: "button", class: "quiet", onclick: () => {
      given.order = (given.sort || "step") === name && given.order !== "up" ? "up" : "down";
      given.sort = name;
      keepInAddress({ sort: name, order: given.order });
      load(0);
    } }, title)));

  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Samples"), count, h("span", { class: "grow" }), save),
    notes(run.sampled.notes) || "",
    h("div", { class: "filters" },
      typed("text", { type: "search", placeholder: "search texts", "aria-label": "search" }),
      field("step", between("first_step", "last_step", "7 or 5 to 9")),
      field("reward", between("least_reward", "most_reward", "0.5 to 1")),
      field("weights version", between("least_version", "most_version", "any")),
      field("how it ended", choice([["", "any"], ...Object.entries(ENDS)], given.finish, change("finish"))),
      field("only", choice([["", "all"], ["best", "best"], ["worst", "worst"], ["longest", "longest"], ["starred", "starred or noted"]], given.notable, change("notable"))),
      run.sampled.tasks.length > 1 ? field("task", choice([["", "all"], ...run.sampled.tasks.map((name) => [name, name])], given.task, change("task"))) : null,
      given.episode ? h("button", { type: "button", onclick: (event) => { event.target.remove(); change("episode")(""); } }, "one prompt ×") : null,
      field("data set", choice([["", "all"], ["training", "training"], ["evaluation", "evaluation"], ...sets.map((name) => [name, name])], given.of, change("of"))),
    ),
    h("div", { class: "split" },
      h("div", { class: "scroll" }, h("table", { class: "samples" }, h("thead", {}, h("tr", {}, heads, h("th", {}, "prompt"), h("th", {}, "answer"))), body), more),
      detail),
  );
  if (!run.sampled.samples && run.sampled.read >= 1) detail.append(message("This run has no samples (samples.share=0), or no step has finished yet."));
  else detail.append(message("Choose an answer. j / k: next / previous answer."));

  async function load(start) {
    const mine = ++latest;
    more.disabled = true;
    save.href = `/api/run/${run.id}/export?${new URLSearchParams(Object.entries(given).filter(([, value]) => value))}`;
    let answer;
    try {
      answer = given.notable === "starred" ? await starred() : await api(`run/${run.id}/samples`, { ...given, start, count: PAGE });
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

  /** Return the answers with a star or a note, as an answer of the server. */
  async function starred() {
    const found = [];
    for (const note of noted.values()) {
      const same = await api(`run/${run.id}/samples`, { first_step: note.step, last_step: note.step, query_id: note.query_id, count: 200 });
      found.push(...same.rows.filter((row) => keyOf(row) === keyOf(note)));
    }
    return { rows: found, matched: found.length, samples: run.sampled.samples, looked_at: found.length, next: null, read: 1 };
  }

  function line(row) {
    const element = h("tr", { tabIndex: 0, "data-at": row.at,
      onclick: () => open(row.at),
      onkeydown: (event) => { if (event.key === "Enter") open(row.at); } },
      h("td", { class: "right" }, figure(row.step)),
      h("td", { class: "right" }, figure(row.reward)),
      h("td", { class: "right", title: ENDS[row.finish_reason] ?? row.finish_reason }, figure(row.answer_tokens), row.finish_reason === "length" ? h("span", { class: "warn" }, " cut off") : null),
      h("td", { class: "right" }, versions(row)),
      h("td", {}, h("div", { class: "cell" }, row.prompt)),
      h("td", {}, h("div", { class: "cell" }, noted.get(keyOf(row))?.star ? "★ " : null, tags(row), row.answer)));
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
    if (alive()) detail.replaceChildren(...whole(sample, run, open, noted));
  }

  const move = (event) => {
    if (event.key === "s" && !event.target.closest("input, textarea, select") && !event.ctrlKey && !event.metaKey) detail.querySelector(".star")?.click();
    if (event.target.closest("input, textarea, select") || (event.key !== "j" && event.key !== "k") || !rows.length) return;
    const at = Math.min(rows.length - 1, Math.max(0, chosen + (event.key === "j" ? 1 : -1)));
    open(rows[at].at);
    body.children[at].scrollIntoView({ block: "nearest" });
  };
  document.addEventListener("keydown", move);
  await load(0);
  return () => document.removeEventListener("keydown", move);
}

const RANGE = /^(-?\d*\.?\d+)?(?:(\s*to\s*|\s*–\s*|(?<=\d)\s*-\s*)(-?\d*\.?\d+)?)?$/;

/** Return the bounds of a range as text: "7" is 7 to 7, "5 to" has no upper bound; null where it is none. */
function rangeOf(text) {
  const found = RANGE.exec(text.trim());
  if (!found) return null;
  const [, low = "", to, high = ""] = found;
  return to ? [low, high] : [low, low];
}

function asRange(low, high) {
  return low === high ? low : `${low} to ${high}`.trim();
}

function tags(row) {
  const names = [...(row.notable || []), ...(row.evaluation ? [row.evaluation] : [])];
  return names.length ? h("span", { class: "tags" }, names.map((name) => h("span", { class: `tag ${name}` }, name))) : null;
}

/** Return what identifies an answer of a run, and the note on it. */
function keyOf(row) {
  return JSON.stringify([row.step, row.evaluation || "", row.query_id, row.episode, row.index]);
}

/** Return a star and a note of an answer; both are saved as they change. */
function marks(sample, run, noted) {
  const key = keyOf(sample);
  const now = noted.get(key) || { star: false, note: "" };
  const said = h("span", { class: "muted", role: "status" });
  const star = h("button", { type: "button", class: "star quiet", title: "star (key: s)", "aria-pressed": String(now.star), onclick: () => keep({ star: !now.star }) }, now.star ? "★" : "☆");
  const note = h("input", { type: "text", placeholder: "note", "aria-label": "note", value: now.note, onchange: () => keep({ note: note.value }) });
  async function keep(change) {
    Object.assign(now, change);
    const { step, query_id, episode, index } = sample;
    try {
      const row = await api(`run/${run.id}/note`, {}, { step, evaluation: sample.evaluation || "", query_id, episode, index, star: now.star, note: now.note });
      if (now.star || now.note) noted.set(key, row);
      else noted.delete(key);
      star.textContent = now.star ? "★" : "☆";
      star.setAttribute("aria-pressed", String(now.star));
      said.textContent = "kept in notes.jsonl";
    } catch (error) {
      said.textContent = error.message;
    }
  }
  return h("div", { class: "marks" }, star, note, said);
}

/** Return the versions of the weights that sampled an answer. */
function versions({ oldest_version: oldest, newest_version: newest }) {
  return oldest === newest ? figure(oldest) : `${figure(oldest)} to ${figure(newest)}`;
}

function whole(sample, run, open, noted) {
  const answer = sample.group.findIndex((one) => one.at === sample.at) + 1;
  const figures = [["reward", figure(sample.reward)], ["tokens", figure(sample.answer_tokens)], ["how it ended", ENDS[sample.finish_reason] ?? sample.finish_reason],
    ["weights version", versions(sample)], ["step", figure(sample.step)], ["prompt id", sample.query_id], ["answer", answer ? `${answer} of ${sample.group.length}` : figure(sample.index)],
    ...Object.entries(sample.metrics || {}).map(([name, value]) => [name, figure(value)])];
  return [
    facts(figures),
    tags(sample),
    marks(sample, run, noted),
    h("h3", {}, "Prompt"), h("pre", { class: "text" }, sample.prompt),
    h("h3", {}, "Answer"),
    ...conversation(sample, sample.group, open),
    ...(sample.reference ? [h("h3", {}, "Right answer"), h("pre", { class: "text reference" }, sample.reference)] : []),
    ...(sample.evaluation ? [] : byToken(sample, run)),
    ...(sample.group.length > 1 ? [h("h3", {}, `Group: ${sample.group.length} answers to this prompt`), group(sample, open)] : []),
  ].filter(Boolean);
}

function group(sample, open) {
  return h("div", { class: "group" }, sample.group.map((one) => h("article", { class: one.at === sample.at ? "chosen" : "", tabIndex: 0,
    onclick: () => open(one.at), onkeydown: (event) => { if (event.key === "Enter") open(one.at); } },
    h("header", {}, h("b", {}, figure(one.reward)), ` ${figure(one.answer_tokens)} tokens${one.finish_reason === "length" ? ", cut off" : ""}`),
    h("pre", { class: "text" }, one.answer))));
}
