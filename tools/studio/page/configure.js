// A configuration: its text, its keys as fields, what is wrong with it, and what it would run.

import { api, choice, configurations, dialog, duration, facts, figure, h, later, message, table } from "./ui.js";
import { legendEntry, runColour } from "./charts.js";

const COMMANDS = { "ppo-math": "train", sft: "sft", dpo: "dpo" };
const KEPT = "studio-configuration";

export async function configurePage({ content, alive, studio }) {
  const [sources, { runs }] = await Promise.all([api("configure/sources"), api("runs")]);
  if (!alive()) return null;
  const state = { experiment: "ppo-math", text: "", name: "run.yaml", schema: null, answer: null, saved: "", started: "", gpu: "H100", changedOnly: false, find: "" };
  Object.assign(state, JSON.parse(sessionStorage.getItem(KEPT) || "{}"));

  const status = h("span", { class: "muted", role: "status" });
  const text = h("textarea", { class: "yaml", spellcheck: false, "aria-label": "configuration as YAML", oninput: later(() => { state.text = text.value; check(); }, 350) });
  const lines = h("div", { class: "problems", "aria-live": "polite" });
  const fields = h("div", { class: "fields" });
  const drawn = h("div", {});
  const planned = h("div", {});
  const output = h("pre", { class: "text log", hidden: true });
  const search = h("input", { type: "search", placeholder: "key or help", "aria-label": "search keys", oninput: later(() => { state.find = search.value.toLowerCase(); showFields(); }, 120) });
  const experiment = choice(Object.keys(COMMANDS).map((name) => [name, name]), state.experiment, (value) => begin(value, state.text, state.name), { "aria-label": "experiment" });
  const options = sourceOptions(sources, runs);
  const open = choice([["", "open…"], ...options], "", async (value) => { open.value = ""; if (value) await take(value); }, { "aria-label": "open", class: "medium" });
  const against = choice([["", "compare…"], ...options], "", (value) => { against.value = ""; if (value) compare(value); }, { "aria-label": "compare with", class: "medium" });
  const preset = h("span", {});
  const name = h("input", { type: "text", class: "name", "aria-label": "file name", value: state.name, onchange: () => { state.name = name.value; } });
  const allowed = studio.may_run ? null : "start the studio with --allow-run";
  const copy = h("button", { type: "button", onclick: async () => {
    const command = `slipstream ${COMMANDS[state.experiment]} --config ${state.name}`;
    try { await navigator.clipboard.writeText(command); status.textContent = `copied: ${command}`; } catch { status.textContent = command; }
  } }, "Copy command");
  const dry = h("button", { type: "button", disabled: !studio.may_run, title: allowed, onclick: async () => {
    output.hidden = false;
    output.textContent = "Checking…";
    try {
      const { code, output: said } = await api("configure/dry-run", {}, { experiment: state.experiment, text: state.text });
      output.textContent = `${said}\nexit code ${code}`;
    } catch (error) { output.textContent = error.message; }
  } }, "Dry run");
  const start = h("button", { type: "button", class: "main", disabled: !studio.may_run, title: allowed, onclick: async () => {
    try {
      await save();
      const { pid, output: file } = await api("configure/start", {}, { experiment: state.experiment, name: state.name });
      status.textContent = `started as process ${pid}; it writes to ${file}, and soon appears under Runs`;
    } catch (error) { status.textContent = error.message; }
  } }, "Start");
  const changed = h("input", { type: "checkbox", onchange: () => { state.changedOnly = changed.checked; showFields(); } });

  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Configure"), experiment, open, preset, against, h("span", { class: "grow" }), name,
      h("button", { type: "button", onclick: () => save().catch((error) => { status.textContent = error.message; }) }, "Save"), copy, dry, start),
    h("div", { class: "bar slim" }, status),
    output,
    h("div", { class: "split even" },
      h("div", {}, h("div", { class: "bar" }, search, h("label", { class: "field" }, changed, "only changed")), fields),
      h("div", { class: "detail plain" }, lines, text, drawn, planned)));

  async function begin(value, given, called) {
    Object.assign(state, { experiment: value, text: given, name: called });
    experiment.value = value;
    name.value = called;
    text.value = given;
    state.schema = await api("configure/schema", { experiment: value });
    if (!alive()) return;
    const names = Object.entries(state.schema.presets);
    preset.replaceChildren(names.length ? choice([["", "preset…"], ...names.map(([id, one]) => [id, `${id}: ${one.about}`])], "",
      (id) => { if (id) set("algorithm.name", id); }, { "aria-label": "preset", class: "medium" }) : "");
    await check();
    if (alive()) showFields();
  }

  async function take(value) {
    try {
      const got = await read(value);
      state.started = value.startsWith("run\n") ? got.text : "";
      await begin(got.experiment, got.text, got.name);
      state.saved = value.startsWith("file\n") ? got.name : "";
      status.textContent = `opened ${got.name}`;
    } catch (error) { status.textContent = error.message; }
  }

  let latest = 0;
  async function check() {
    sessionStorage.setItem(KEPT, JSON.stringify({ experiment: state.experiment, text: state.text, name: state.name, started: state.started, gpu: state.gpu }));
    const mine = ++latest;
    let answer;
    try {
      answer = await api("configure/check", {}, { experiment: state.experiment, text: state.text, gpu: state.gpu });
    } catch (error) { status.textContent = error.message; return; }
    if (!alive() || mine !== latest) return;
    state.asStarted = Boolean(state.text) && state.text === state.started;
    state.answer = state.asStarted ? { ...answer, problems: [], warnings: [] } : answer;
    showProblems();
    markFields();
    showAllocation();
    showPlan();
  }

  // One change after the other: each is made in the text that the one before has left.
  let turn = Promise.resolve();
  function set(key, value) {
    turn = turn.then(() => changeKey(key, value));
    return turn;
  }

  async function changeKey(key, value) {
    try {
      const { text: changedText } = await api("configure/set", {}, { text: state.text, key, value });
      state.text = text.value = changedText;
      await check();
    } catch (error) { status.textContent = error.message; }
  }

  async function save() {
    const body = { name: state.name, text: state.text, replace: state.saved === state.name };
    try {
      const { path } = await api("configure/save", {}, body);
      state.saved = state.name;
      status.textContent = `saved ${path}`;
    } catch (error) {
      if (!error.message.includes("is there already") || !confirm(`${state.name} is there already. Replace it?`)) throw error;
      state.saved = state.name;
      await save();
    }
  }

  function showProblems() {
    const { problems, warnings } = state.answer;
    lines.replaceChildren(
      state.answer.system ? h("p", { class: "note" }, `This is a recipe of ${state.answer.system}. `, h("button", { type: "button", onclick: migrate }, "Migrate it")) : "",
      verdict(problems.length),
      ...problems.map((one) => h("button", { type: "button", class: "problem", onclick: () => go(one) },
        h("b", {}, one.key || "text"), one.line ? h("span", { class: "muted" }, ` line ${one.line}`) : null, ` ${one.message}`)),
      ...warnings.map((one) => h("p", { class: "note" }, one)));
  }

  function verdict(number) {
    if (state.asStarted) return h("p", { class: "muted" }, "A run was started with this configuration. It is checked as soon as you change it.");
    if (!number) return h("p", { class: "fine" }, "All rules of the configuration hold.");
    return h("p", { class: "error" }, number === 1 ? "1 problem" : `${number} problems`);
  }

  function go(problem) {
    const row = fields.querySelector(`[data-key="${CSS.escape(problem.key)}"]`);
    if (row) {
      row.closest("details").open = true;
      row.scrollIntoView({ block: "center" });
      row.querySelector("input, select")?.focus();
    }
    if (problem.line) {
      const before = state.text.split("\n").slice(0, problem.line - 1).join("\n").length;
      if (!row) text.focus();
      text.setSelectionRange(before + 1, before + 1 + (state.text.split("\n")[problem.line - 1] || "").length);
    }
  }

  function showFields() {
    const values = state.answer?.values || {};
    const general = state.schema.groups.filter((group) => group.name === "general");
    const groups = [...general, ...state.schema.groups.filter((group) => !general.includes(group))].map((group) => {
      const keys = group.keys.filter((one) => (!state.changedOnly || differs(one, values))
        && (!state.find || `${one.key} ${one.help}`.toLowerCase().includes(state.find)));
      if (!keys.length) return null;
      const isOpen = Boolean(state.find) || state.changedOnly || group.name === "general" || keys.some((one) => differs(one, values));
      return h("details", { open: isOpen }, h("summary", {}, group.name, h("span", { class: "muted" }, ` ${group.about}`)), [...keys].sort((a, b) => b.required - a.required).map(row));
    }).filter(Boolean);
    fields.replaceChildren(...(groups.length ? groups : [message("No key fits.")]));
    markFields();
  }

  function row(one) {
    const label = one.key.split(".").pop();
    const given = state.answer?.values[one.key];
    const control = one.choices.length || one.type === "bool"
      ? choice([["", one.default === null ? "" : `${one.default} (default)`], ...(one.choices.length ? one.choices : ["true", "false"]).map((value) => [value, value])], given ?? "", (value) => set(one.key, value === "" ? null : value), { "aria-label": one.key })
      : h("input", { type: "text", "aria-label": one.key, placeholder: one.required ? "required" : one.default ?? "", value: given ?? "",
        onchange: (event) => set(one.key, event.target.value === "" ? null : event.target.value) });
    const bounds = Object.entries(one.bounds).map(([sign, value]) => `${{ ge: "≥", gt: ">", le: "≤", lt: "<" }[sign]} ${value}`).join(", ");
    return h("div", { class: "key", "data-key": one.key, "data-default": one.default ?? "" },
      h("div", {}, h("code", { title: one.key }, label), h("span", { class: "muted" }, ` ${one.type}${bounds ? ` ${bounds}` : ""}`)),
      control,
      h("p", { class: "help" }, `${one.help}.`, one.needs ? h("span", { class: "muted" }, ` Needs ${one.needs}.`) : null),
      h("p", { class: "wrong", role: "alert" }));
  }

  function markFields() {
    if (!state.answer) return;
    const wrong = new Map(state.answer.problems.map((one) => [one.key, one.message]));
    for (const element of fields.querySelectorAll(".key")) {
      const key = element.dataset.key, control = element.querySelector("input, select");
      const given = state.answer.values[key];
      element.classList.toggle("changed", given !== undefined && given !== element.dataset.default);
      element.classList.toggle("bad", wrong.has(key));
      element.querySelector(".wrong").textContent = wrong.get(key) || "";
      if (document.activeElement !== control) {
        if (control.tagName === "SELECT" && given !== undefined && ![...control.options].some((one) => one.value === given)) control.append(h("option", { value: given }, given));
        control.value = given ?? "";
      }
    }
  }

  function showAllocation() {
    const found = state.answer.allocation;
    if (!found) { drawn.replaceChildren(); return; }
    const tint = new Map(found.roles.map((one, i) => [one.role, runColour(i)]));
    drawn.replaceChildren(h("h3", {}, "Allocation ", h("code", {}, found.text)),
      h("p", { class: "legend" }, found.roles.map((one) => legendEntry(tint.get(one.role), `${one.role} ${one.layout}${one.device ? ` on ${one.device}` : ""}`))),
      h("div", { class: "nodes" }, Array.from({ length: Math.min(found.nodes, 16) }, (_, node) => h("div", { class: "node" }, h("span", { class: "muted" }, `node ${node}`),
        h("div", { class: "slots" }, Array.from({ length: found.per_node }, (_, gpu) => {
          const roles = found.slots[`${node}/${gpu}`] || [];
          return h("div", { class: "slot", title: roles.join("\n") || "not used" }, roles.map((role) => {
            const bar = h("i", {});
            bar.style.background = tint.get(role.split(" ")[0]);
            return bar;
          }), h("span", {}, gpu));
        }))))),
      found.nodes > 16 ? message(`and ${found.nodes - 16} more nodes`) : "");
  }

  function showPlan() {
    const plan = state.answer.plan;
    if (!plan) { planned.replaceChildren(); return; }
    const gpu = choice(state.schema.gpus.map((one) => [one, one]), state.gpu, (value) => { state.gpu = value; check(); }, { "aria-label": "GPU" });
    const head = h("h3", { class: "bar slim" }, "Plan for", gpu);
    if (plan.error) { planned.replaceChildren(head, message(plan.error)); return; }
    const gib = (bytes) => `${figure(bytes / 2 ** 30)} GiB`;
    const limit = plan.gpu.bytes;
    planned.replaceChildren(head, h("p", { class: plan.fits ? "" : "warn" }, plan.verdict),
      plan.seconds ? facts([["step", duration(plan.seconds.step)], ["update", duration(plan.seconds.update)],
        ["log-probabilities", duration(plan.seconds.passes)], ["generation", duration(plan.seconds.rollout)], ["weight update", duration(plan.seconds.push)],
        ["wait for answers", duration(plan.seconds.wait)],
        ["trained tokens/s", figure(plan.seconds.tokens / plan.seconds.step)]]) : "",
      ...plan.ranks.map((rank) => h("div", {},
        h("p", { class: "muted" }, `${plan.ranks.length > 1 ? `${rank.name}: ` : ""}${figure(rank.num_ranks)} ${rank.num_ranks === 1 ? "rank" : "ranks"}`),
        rank.phases.map((phase) => {
          const bar = h("i", { class: phase.total > limit && plan.on_gpu ? "over" : "" });
          bar.style.width = `${Math.min(100, 100 * phase.total / Math.max(limit, 1))}%`;
          return h("div", { class: "memory", title: Object.entries(phase.parts).map(([part, size]) => `${part}: ${gib(size)}`).join("\n") }, h("span", {}, phase.name), h("div", { class: "track" }, bar), h("b", {}, gib(phase.total)));
        }))),
      ...plan.advice.map((one) => h("p", { class: "note" }, `${one.keys}: ${one.words}`)));
  }

  async function migrate() {
    try {
      const answer = await api("configure/migrate", {}, { text: state.text, name: state.name });
      await begin(answer.experiment, answer.text, state.name);
      status.textContent = `migrated from ${answer.system}`;
      dialog(`What became of the keys of ${answer.system}`, table([{ title: "key", cell: (one) => h("code", {}, one.key) }, { title: "value", cell: (one) => one.value },
        { title: "", cell: (one) => one.fate }, { title: "here, or what to do", cell: (one) => one.note }], answer.rows));
    } catch (error) { status.textContent = error.message; }
  }

  async function compare(value) {
    try {
      const other = await read(value);
      dialog(`${state.name} and ${other.name}`, await configurations(state.name, state.text, other.name, other.text));
    } catch (error) { status.textContent = error.message; }
  }

  await begin(state.experiment, state.text, state.name);
  if (!state.text) status.textContent = `Open a recipe, a file of ${sources.folder} or the configuration of a run; or set keys on the left.`;
  return null;
}

/** Return whether a text gives a key another value than its default. */
function differs(one, values) {
  return one.key in values && values[one.key] !== one.default;
}

/** Return the text of an option of sourceOptions(). */
function read(option) {
  const [of, name] = option.split("\n");
  return of === "run" ? api(`run/${name}/config`) : api("configure/text", { of, name });
}

function sourceOptions(sources, runs) {
  return [
    ...sources.recipes.map((one) => [`recipe\n${one}`, `recipe: ${one}`]),
    ...sources.files.map((one) => [`file\n${one}`, `file: ${one}`]),
    ...runs.map((one) => [`run\n${one.id}`, `run: ${one.name}`]),
  ];
}
