// Curves by uPlot, heat maps on a canvas.

import { compact, figure, h } from "./ui.js";

const HEIGHT = 170;

/** Return a colour of the style sheet. */
export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Return the colour of the i-th run. */
export function runColour(i) {
  return colour(`run-${i % 8}`);
}

/** Return a name of a legend, with its colour. */
export function legendEntry(tint, ...children) {
  const mark = h("i", {});
  mark.style.background = tint;
  return h("span", {}, mark, ...children);
}

/** Draw curves into a box. `curves`: {x, y, smooth, label}. `zoom(from, to)` is called after a selection; null, null
 * after a double click, `explain(text)` as the pointer moves, with null where it leaves. Return a function that removes
 * the chart. */
export function drawCurves(box, curves, { axis, sync, zoom, explain }) {
  const series = [{ label: axis }];
  const tables = [];
  curves.forEach((curve, i) => {
    if (!curve.x.length) return;
    const stroke = runColour(i);
    const few = curve.x.length < 40;
    if (curve.smooth) {
      series.push({ label: `${curve.label} raw`, stroke: stroke + "55", width: 1, spanGaps: true, points: { show: false } });
      series.push({ label: curve.label, stroke, width: 2, spanGaps: true, points: { show: false } });
      tables.push([curve.x, curve.y, curve.smooth]);
    } else {
      series.push({ label: curve.label, stroke, width: 1.5, spanGaps: true, points: { show: few, size: 5, fill: stroke } });
      tables.push([curve.x, curve.y]);
    }
  });
  if (!tables.length) return () => {};
  const data = tables.length === 1 ? tables[0] : uPlot.join(tables);
  const line = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false, size: 0 }, font: "11px system-ui" };
  const label = (u, values) => ticks(values);
  const chart = new uPlot({
    width: Math.max(200, box.clientWidth), height: HEIGHT, padding: [8, 12, 0, 0],
    scales: { x: { time: false }, y: { range: (u, low, high) => flat(low, high) } },
    axes: [{ ...line, values: label, size: 22, gap: 6 }, { ...line, values: label, size: 56 }],
    series,
    cursor: { sync: { key: sync }, drag: { x: true, y: false }, points: { size: 6 } },
    legend: { show: false },
    hooks: {
      setSelect: [(u) => {
        if (u.select.width < 8) return;
        zoom(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x"));
      }],
      setCursor: [(u) => explain(u.cursor.idx === null || u.cursor.idx === undefined ? null : under(u, axis))],
      ready: [(u) => u.over.addEventListener("dblclick", () => zoom(null, null))],
    },
  }, data, box);
  const sizes = new ResizeObserver(() => chart.setSize({ width: Math.max(200, box.clientWidth), height: HEIGHT }));
  sizes.observe(box);
  return () => { sizes.disconnect(); chart.destroy(); };
}

/** Return the labels of an axis, with as many decimals as they differ in. */
function ticks(values) {
  const step = values.length > 1 ? values[1] - values[0] : 0, largest = Math.max(...values.map(Math.abs));
  if (largest >= 1e6 && largest < 1e15) return values.map(compact);
  if (!(step >= 1e-5) || largest >= 1e6) return values.map(figure);
  const decimals = [0, 1, 2, 3, 4, 5, 6].find((n) => Math.abs(step * 10 ** n - Math.round(step * 10 ** n)) < 1e-6) ?? 6;
  return values.map((value) => value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals }));
}

/** Return the range of an axis: from 0 where no value is negative, with some room, also for a constant. */
function flat(low, high) {
  if (low === null || high === null) return [0, 1];
  if (low >= 0) return [0, high > 0 ? high * 1.06 : 1];
  const room = high > low ? (high - low) * 0.06 : Math.max(Math.abs(low) * 0.1, 0.01);
  return [low - room, high + room];
}

/** Return the values under the pointer, the nearest of each curve. */
function under(u, axis) {
  const at = u.cursor.idx;
  const shown = u.series.slice(1).map((one, i) => {
    if (one.label.endsWith(" raw")) return null;
    const values = u.data[i + 1];
    for (let d = 0; d < 40; d += 1) for (const j of [at - d, at + d]) if (values[j] !== null && values[j] !== undefined) return figure(values[j]);
    return "–";
  }).filter((text) => text !== null);
  return `${axis} ${figure(Math.round(u.data[0][at]))}: ${shown.join(" · ")}`;
}

/** Draw a histogram over the steps: a column for each step, the darker the larger its share. */
export function drawHeat(box, { steps, labels, counts }, explain) {
  const left = 56, width = Math.max(200, box.clientWidth), scale = devicePixelRatio || 1;
  const canvas = h("canvas", { width: width * scale, height: HEIGHT * scale, role: "img", "aria-label": "histogram by step" });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${HEIGHT}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const top = 6, bottom = 22, wide = (width - left - 6) / Math.max(1, steps.length);
  const high = (HEIGHT - top - bottom) / Math.max(1, labels.length);
  const sums = steps.map((_, i) => labels.reduce((sum, _label, r) => sum + counts[r][i], 0));
  labels.forEach((label, r) => {
    const y = HEIGHT - bottom - (r + 1) * high;
    steps.forEach((_, i) => {
      const share = sums[i] ? counts[r][i] / sums[i] : 0;
      if (!share) return;
      pen.globalAlpha = 0.12 + 0.88 * share;
      pen.fillStyle = colour("accent");
      pen.fillRect(left + i * wide, y, Math.ceil(wide), Math.max(1, high - 1));
    });
    pen.globalAlpha = 1;
    pen.fillStyle = colour("muted");
    pen.font = "11px system-ui";
    pen.textAlign = "right";
    if (labels.length <= 12 || r % Math.ceil(labels.length / 12) === 0) pen.fillText(label, left - 8, y + high / 2 + 4);
  });
  pen.textAlign = "left";
  if (steps.length) pen.fillText(figure(steps[0]), left, HEIGHT - 6);
  pen.textAlign = "right";
  if (steps.length > 1) pen.fillText(figure(steps[steps.length - 1]), width - 6, HEIGHT - 6);
  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect();
    const i = Math.floor((event.clientX - box.left - left) / wide);
    const r = Math.floor((HEIGHT - bottom - (event.clientY - box.top)) / high);
    if (steps[i] !== undefined && labels[r] !== undefined) explain(`step ${figure(steps[i])}, ${labels[r]}: ${figure(counts[r][i])}`);
  });
  box.append(canvas);
  return () => canvas.remove();
}
