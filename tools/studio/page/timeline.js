// What each process did when: a row for each span that overlaps others, so that prompt slots read as a Gantt chart.

import { api, duration, figure, h, keepInAddress, message } from "./ui.js";
import { colour, legendEntry } from "./charts.js";

const ROW = 12, LABEL = 190, AXIS = 22, GAP = 8;

export async function timelinePage({ content, query, run, alive }) {
  const step = h("input", { type: "number", min: 0, class: "short", "aria-label": "step", value: query.get("step") || "" });
  const count = h("input", { type: "number", min: 1, max: 20, class: "short", "aria-label": "steps", value: query.get("steps") || 1 });
  const said = h("span", { class: "muted", role: "status" });
  const what = h("p", { class: "what" }, "Point at a bar. Drag to zoom, double-click for all.");
  const box = h("div", { class: "lanes" });
  const names = h("p", { class: "legend" });
  let drawn = null, window_ = null;
  const load = async (first) => {
    const several = Math.max(1, Number(count.value) || 1);
    keepInAddress({ step: first ?? "", steps: several > 1 ? several : null });
    let answer;
    try {
      answer = await api(`run/${run.id}/timeline`, first === undefined ? {} : { first, last: first + several - 1 });
    } catch (error) {
      if (alive()) box.replaceChildren(message(error.message, "error"));
      return;
    }
    if (!alive()) return;
    drawn = answer;
    window_ = [0, answer.seconds];
    step.value = answer.steps[0][0];
    const left = answer.left_out ? `; the ${figure(answer.left_out)} shortest spans are left out` : "";
    said.textContent = `${duration(answer.seconds)}; spans of the steps ${figure(answer.known[0])} to ${figure(answer.known[1])} are kept${left}`;
    draw();
  };
  const go = (by) => load(Math.min(drawn.known[1], Math.max(drawn.known[0], Number(step.value) + by)));
  step.addEventListener("change", () => load(Number(step.value)));
  count.addEventListener("change", () => load(Number(step.value)));
  content.append(
    h("div", { class: "bar" }, h("h1", {}, "Timeline"), h("label", { class: "field" }, "step", step),
      h("button", { type: "button", onclick: () => go(-1), "aria-label": "step before" }, "‹"),
      h("button", { type: "button", onclick: () => go(1), "aria-label": "next step" }, "›"),
      h("label", { class: "field" }, "steps", count), said),
    names, what, box);

  function palette() {
    const seconds = new Map();  // the longest get the colours that differ most
    for (const [name, , length] of drawn.lanes.flatMap((lane) => lane.spans)) seconds.set(name, (seconds.get(name) || 0) + length);
    const all = [...seconds.keys()].sort((a, b) => seconds.get(b) - seconds.get(a));
    return new Map(all.map((name, i) => [name, colour(`run-${i % 8}`) + (i % 16 < 8 ? "" : "80")]));
  }

  function draw() {
    const colours = palette();
    names.replaceChildren(...[...colours].slice(0, 16).map(([name, tint]) => legendEntry(tint, name)));
    const width = Math.max(600, box.clientWidth), scale = devicePixelRatio || 1;
    const heights = drawn.lanes.map((lane) => Math.min(lane.rows, 64) * ROW + GAP);
    const height = heights.reduce((a, b) => a + b, 0) + AXIS;
    const canvas = h("canvas", { width: width * scale, height: height * scale, role: "img", "aria-label": "timeline of the processes" });
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "11px system-ui";
    const [from, to] = window_;
    const at = (seconds) => LABEL + (seconds - from) / (to - from) * (width - LABEL - 8);
    const hits = [];
    let y = 0;
    drawn.lanes.forEach((lane, i) => {
      pen.fillStyle = colour(i % 2 ? "card" : "soft");
      pen.fillRect(0, y, width, heights[i]);
      pen.fillStyle = colour("ink");
      pen.fillText(cut(pen, lane.lane ? `${lane.process} · ${lane.lane}` : lane.process, LABEL - 16), 8, y + 14);
      for (const span of lane.spans) {
        const [name, begin, length, row] = span;
        if (row >= 64 || begin > to || begin + length < from) continue;
        const x = Math.max(LABEL, at(begin)), w = Math.max(1, Math.min(width - 8, at(begin + length)) - x);
        pen.fillStyle = colours.get(name);
        pen.fillRect(x, y + GAP / 2 + row * ROW + 1, w, ROW - 2);
        hits.push([x, y + GAP / 2 + row * ROW, w, span, lane]);
      }
      y += heights[i];
    });
    pen.strokeStyle = pen.fillStyle = colour("muted");
    for (const [number, , end] of drawn.steps) {
      if (end < from || end > to + 1e-9) continue;
      pen.beginPath();
      pen.moveTo(at(end), 0);
      pen.lineTo(at(end), y);
      pen.stroke();
      pen.textAlign = "right";
      pen.fillText(`end of step ${figure(number)}`, at(end), y + 15);
    }
    pen.textAlign = "center";
    for (const seconds of roundTimes(from, to)) {
      const x = at(seconds), covered = drawn.steps.some(([, , end]) => x > at(end) - 110 && x < at(end) + 20);
      if (!covered) pen.fillText(duration(seconds), x, y + 15);
    }
    pen.textAlign = "left";
    let pressed = null;
    const seconds = (event) => from + (event.offsetX - LABEL) / (width - LABEL - 8) * (to - from);
    canvas.addEventListener("mousemove", (event) => {
      const hit = hits.findLast(([x, top, w]) => event.offsetX >= x - 1 && event.offsetX <= x + w + 1 && event.offsetY >= top && event.offsetY < top + ROW);
      if (!hit) return;
      const [name, begin, length, , of, details] = hit[3];
      const more = Object.entries(details).filter(([key]) => key !== "of").map(([key, value]) => `${key} ${value}`).join(", ");
      what.textContent = `${hit[4].process}${hit[4].lane ? ` · ${hit[4].lane}` : ""}: ${name}, ${duration(length)} from ${duration(begin)}${of > 1 ? `, stands for ${of}` : ""}${more ? `; ${more}` : ""}`;
    });
    canvas.addEventListener("mousedown", (event) => { pressed = seconds(event); });
    canvas.addEventListener("mouseup", (event) => {
      const released = seconds(event);
      if (pressed !== null && Math.abs(released - pressed) > (to - from) / 100) { window_ = [Math.min(pressed, released), Math.max(pressed, released)]; draw(); }
      pressed = null;
    });
    canvas.addEventListener("dblclick", () => { window_ = [0, drawn.seconds]; draw(); });
    box.replaceChildren(canvas);
  }
  const again = () => drawn && draw();
  document.addEventListener("theme", again);
  await load(query.get("step") ? Number(query.get("step")) : undefined);
  return () => document.removeEventListener("theme", again);
}

/** Return about eight round numbers between two. */
function roundTimes(from, to) {
  const size = 10 ** Math.floor(Math.log10((to - from) / 8));
  const step = [1, 2, 5, 10].map((n) => n * size).find((one) => (to - from) / one <= 8);
  const first = Math.ceil(from / step);
  return Array.from({ length: Math.floor(to / step) - first + 1 }, (_, i) => (first + i) * step);
}

function cut(pen, text, width) {
  while (text.length > 4 && pen.measureText(text).width > width) text = `${text.slice(0, -2)}…`;
  return text;
}
