// The frame: which page the address names, its navigation, keys, and light or dark.

import { address, api, dialog, h, message, place } from "./ui.js";
import { runsPage } from "./runs.js";
import { metricsPage } from "./metrics.js";
import { configurePage } from "./configure.js";
import { healthPage } from "./health.js";
import { samplesPage } from "./samples.js";
import { timelinePage } from "./timeline.js";
import { processesPage } from "./processes.js";
import { explainPage } from "./explain.js";
import { pairsPage } from "./pairs.js";
import { askPage, whyNoQuestions } from "./ask.js";

const RUN_PAGES = {
  metrics: ["Metrics", metricsPage],
  health: ["Health", healthPage],
  samples: ["Samples", samplesPage],
  pairs: ["Side by side", pairsPage],
  timeline: ["Timeline", timelinePage],
  processes: ["Processes", processesPage],
  explain: ["Explain", explainPage],
  ask: ["Ask", askPage],
};
const PAGES = { "": ["Runs", runsPage], configure: ["Configure", configurePage] };
let leave = null;
let ordinal = 0;
let studio = null;

async function show() {
  const { parts, query } = place();
  const mine = ++ordinal;
  if (leave) leave();
  leave = null;
  const main = document.getElementById("main");
  const isRun = parts[0] === "run" && parts[1];
  const [, page] = isRun ? RUN_PAGES[parts[2] || "metrics"] || RUN_PAGES.metrics : PAGES[parts[0] || ""] || PAGES[""];
  navigation(parts);
  const content = h("div", { class: "page" });
  main.replaceChildren(content);
  const alive = () => mine === ordinal;
  try {
    const [may, run] = await Promise.all([studio || api("studio"), isRun ? api(`run/${encodeURIComponent(parts[1])}`) : null]);
    if (!alive()) return;
    studio = may;
    if (run) navigation(parts, run);
    document.title = run ? `${run.name} · studio` : "Slipstream studio";
    const ended = await page({ content, query, run, parts, alive, studio });
    if (alive()) leave = ended || null;
    else if (ended) ended();
  } catch (error) {
    if (alive()) content.replaceChildren(message(error.message, "error"));
  }
}

function navigation(parts, run = null) {
  const here = parts[0] || "";
  const links = Object.entries(PAGES).map(([name, [title]]) => link(name ? [name] : [], title, here === name));
  if (run) {
    const page = parts[2] || "metrics";
    links.push(h("span", { class: "crumb", title: run.logs }, run.name));
    const nothing = {
      explain: run.saved ? null : "this run saved no batch (monitor.save_batches)",
      ask: run.questions ? null : whyNoQuestions(run),
    };
    links.push(...Object.entries(RUN_PAGES).map(([name, [title]]) => link(["run", run.id, name], title, page === name, nothing[name])));
  }
  document.getElementById("nav").replaceChildren(...links);
}

/** Return a link of the navigation. `nothing`: why its page has nothing for this run. */
function link(parts, title, current, nothing = null) {
  return h("a", { href: address(parts), "aria-current": current ? "page" : null, class: nothing ? "dim" : null, title: nothing }, title);
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = name === "dark" ? "Light" : "Dark";
  document.dispatchEvent(new CustomEvent("theme"));
}

function otherTheme() {
  const name = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("theme", name);
  setTheme(name);
}

const KEYS = [
  ["1 … 9, 0", "page of the navigation"], ["/", "search"], ["j, k", "next, previous answer"],
  ["s", "star an answer"], ["d", "dark or light"], ["?", "these keys"],
];

document.addEventListener("keydown", (event) => {
  if (event.target.closest("input, textarea, select, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
  const links = [...document.querySelectorAll("#nav a")];
  if (/^\d$/.test(event.key) && links[(Number(event.key) + 9) % 10]) links[(Number(event.key) + 9) % 10].click();
  else if (event.key === "/") {
    const search = document.querySelector("input[type=search]");
    if (!search) return;
    event.preventDefault();
    search.focus();
  } else if (event.key === "d") otherTheme();
  else if (event.key === "?") {
    dialog("Keys", h("dl", {}, KEYS.flatMap(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])));
  }
});
document.getElementById("theme").addEventListener("click", otherTheme);
setTheme(localStorage.getItem("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
addEventListener("hashchange", show);
show();
