// The processes of a run and their logs.

import { api, choice, duration, every, figure, h, later, message, percent, table } from "./ui.js";

export async function processesPage({ content, run, alive, studio }) {
  const list = h("div", {});
  const cards = h("div", {});
  const stacks = h("pre", { class: "text log", hidden: true });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Processes")), list, cards, stacks);
  const columns = [
    { title: "process", cell: (one) => one.name },
    { title: "host", cell: (one) => one.host },
    { title: "pid", align: "right", cell: (one) => String(one.pid) },
    { title: "state", cell: (one) => h("span", { class: `state ${one.state}` }, one.state) },
    { title: "memory", align: "right", cell: (one) => one.gib === null ? "–" : `${figure(one.gib)} GiB` },
    { title: "GPU memory", align: "right", cell: (one) => one.gpu_gib === null ? "–" : `${figure(one.gpu_gib)} GiB` },
    { title: "last activity", align: "right", cell: (one) => one.seconds_since === null ? "–" : `${duration(one.seconds_since)} ago` },
    { title: "", cell: (one) => h("span", {},
      one.log ? h("button", { type: "button", class: "quiet", onclick: () => pick(one.log) }, "log") : null,
      studio.may_run && one.state !== "ended" ? h("button", { type: "button", class: "quiet", onclick: () => ask(one.name) }, "stacks") : null) },
  ];
  const ofCards = [
    { title: "GPU", cell: (one) => `${one.index} · ${one.name}` },
    { title: "GPU use", align: "right", cell: (one) => one.use === null ? "–" : percent(one.use) },
    { title: "memory", align: "right", cell: (one) => `${figure(one.gib)} of ${figure(one.of_gib)} GiB` },
  ];
  const refresh = async () => {
    const answer = await api(`run/${run.id}/processes`);
    if (!alive()) return answer;
    list.replaceChildren(answer.processes.length ? table(columns, answer.processes) : message("No process has left a file: the run is of another release, or has not begun."));
    cards.replaceChildren(...(answer.gpus.length ? [table(ofCards, answer.gpus)] : []));
    return answer;
  };
  async function ask(name) {
    stacks.hidden = false;
    stacks.textContent = `Asking ${name}…`;
    try {
      stacks.textContent = (await api(`run/${run.id}/stacks`, {}, { name })).text || "The process has ended.";
    } catch (error) {
      stacks.textContent = error.message;
    }
  }
  const { logs } = await refresh();
  if (!alive()) return null;
  const lines = h("pre", { class: "text log", tabIndex: 0, "aria-label": "lines of the log" });
  const said = h("span", { class: "muted", role: "status" });
  const filter = h("input", { type: "search", placeholder: "filter lines", "aria-label": "filter lines", oninput: later(() => read()) });
  let name = logs.includes("master_worker.log") ? "master_worker.log" : logs[0];
  const select = choice(logs.map((log) => [log, log]), name, (value) => { name = value; read(); }, { "aria-label": "log" });
  const pick = (log) => { name = select.value = log; read(); };
  async function read() {
    if (!name) return;
    const answer = await api(`run/${run.id}/log`, { name, text: filter.value });
    if (!alive()) return;
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 20;
    lines.replaceChildren(...answer.lines.map((line) => h("div", { class: / (WARNING|ERROR|CRITICAL): /.test(line) ? "warn" : "" }, line)));
    said.textContent = `${figure(Math.min(answer.found, answer.lines.length))} of the last ${figure(answer.of)} lines`;
    if (atEnd) lines.scrollTop = lines.scrollHeight;
  }
  if (logs.length) content.append(h("div", { class: "bar logs" }, h("h2", {}, "Log"), select, filter, said), lines);
  await read();
  lines.scrollTop = lines.scrollHeight;
  return every(5000, () => Promise.all([refresh(), read()]));
}
