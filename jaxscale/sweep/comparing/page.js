"use strict";
// Draws the page's JSON; all text is inserted as text, never as HTML. `curves` and `parallel` are independent.
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";

function make(parent, tag, attributes = {}, text = null) {
  const inSvg = tag !== "div" && (tag === "svg" || parent instanceof SVGElement);
  const node = inSvg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  parent.append(node);
  return node;
}

function worded(x) {
  if (x === null || x === undefined) return "none";
  if (typeof x !== "number") return String(x);
  if (!Number.isFinite(x)) return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e7) return x.toLocaleString("en-US");
  const size = Math.abs(x);
  return size >= 1e6 ? x.toExponential(2).replace("e+", "e") : String(+x.toPrecision(4));
}

// A scale maps values to pixels; ticks are round numbers inside its domain.
function scaleOf(low, high, from, to, log) {
  const f = log ? Math.log10 : (x) => x;
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const a = f(low), b = f(high);
  const scale = (x) => from + ((f(x) - a) / (b - a)) * (to - from);
  scale.invert = (p) => { const v = a + ((p - from) / (to - from)) * (b - a); return log ? 10 ** v : v; };
  scale.ticks = (count) => {
    const out = [];
    if (log && b - a >= 1) {
      const every = Math.max(1, Math.ceil((b - a) / count));
      for (let e = Math.ceil(a - 1e-9); e <= b + 1e-9; e += every) out.push(10 ** e);
      if (out.length >= 3) return out;
      return [...new Set([1, 2, 5].flatMap((m) => [Math.floor(a), Math.floor(a) + 1, Math.floor(a) + 2].map((e) => m * 10 ** e)))]
        .filter((x) => x >= low * 0.999 && x <= high * 1.001).sort((x, y) => x - y);
    }
    const raw = (high - low) / count, ten = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 2.5, 5, 10].map((m) => m * ten).find((s) => s >= raw);
    for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) out.push(+(k * step).toPrecision(12));
    return out;
  };
  return scale;
}

// Up to eight lines have distinct colours; more are coloured by how good they are.
const color = (place, count, goodness) =>
  count <= 8 ? `var(--c${place})`
  : goodness === null ? "var(--soft)"
  : `color-mix(in oklab, var(--good) ${Math.round(goodness * 100)}%, var(--bad))`;

function goodnessOf(values) {
  const order = [...values.keys()].filter((i) => values[i] !== null).sort((a, b) => values[a] - values[b]);
  const out = values.map(() => null);
  order.forEach((i, rank) => { out[i] = order.length > 1 ? 1 - rank / (order.length - 1) : 1; });
  return out;
}

function curves(root) {
  const state = { metric: data.metrics[0].name, logX: false, logY: false, single: false, hidden: new Set(), on: null };
  const tools = make(root, "div", { class: "tools" });
  const pick = make(tools, "select", { "aria-label": "metric" });
  for (const m of data.metrics) make(pick, "option", { value: m.name }, m.name);
  pick.onchange = () => { state.metric = pick.value; draw(); };
  const toggle = (text, key) => {
    const label = make(tools, "label");
    const box = make(label, "input", { type: "checkbox" });
    label.append(text);
    box.onchange = () => { state[key] = box.checked; draw(); };
  };
  toggle("log steps", "logX");
  toggle("log values", "logY");
  if (data.groups.some((g) => g.runs.length > 1)) toggle("every run", "single");
  const chart = make(root, "div", { class: "chart" });
  const tip = make(chart, "div", { class: "tip", hidden: "" });
  const note = make(root, "p", { class: "note", "aria-live": "polite" });
  const legend = make(root, "div", { class: "legend" });
  const goodness = goodnessOf(data.groups.map((g) => g.best));
  const colors = data.groups.map((_, i) => color(i, data.groups.length, goodness[i]));
  data.groups.forEach((g, i) => {
    const button = make(legend, "button", { type: "button", "aria-pressed": "true", title: "show or hide" });
    make(button, "i", { class: "key", style: `background:${colors[i]}` });
    make(button, "span", {}, g.label + (g.runs.length > 1 ? ` (${g.runs.length} seeds)` : ""));
    button.onclick = () => {
      state.hidden.has(i) ? state.hidden.delete(i) : state.hidden.add(i);
      button.setAttribute("aria-pressed", String(!state.hidden.has(i)));
      draw();
    };
    button.onpointerenter = () => { state.on = i; draw(); };
    button.onpointerleave = () => { state.on = null; draw(); };
  });

  function draw() {
    const m = data.metrics.find((one) => one.name === state.metric);
    const width = Math.max(280, chart.clientWidth), height = Math.round(Math.min(430, Math.max(250, width * 0.48)));
    const edge = { left: 54, right: 12, top: 26, bottom: 36 };
    const usable = (y) => typeof y === "number" && (!state.logY || y > 0);
    const lines = [];
    m.bands.forEach((band, g) => {
      if (state.hidden.has(g)) return;
      const runs = data.groups[g].runs;
      if (state.single) runs.forEach((r) => lines.push({ g, label: data.runs[r], mid: m.runs[r] }));
      else if (band === null) lines.push({ g, label: data.groups[g].label, mid: m.runs[runs[0]] });
      else lines.push({ g, label: data.groups[g].label, ...band });
    });
    const values = lines.flatMap((l) => [...l.mid, ...(l.low || []), ...(l.high || [])]).filter(usable).sort((a, b) => a - b);
    chart.querySelector("svg")?.remove();
    const svg = make(chart, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${m.name} over steps` });
    if (!values.length) { make(svg, "text", { x: 20, y: 40 }, "no values to draw"); return; }
    // cut the axis so that a diverged run does not flatten the others
    let low = values[0], high = values[values.length - 1];
    const most = values[Math.floor((values.length - 1) * 0.97)], cut = !state.logY && high - low > 4 * (most - low) && most > low;
    if (cut) high = most + 0.3 * (most - low);
    const x = scaleOf(m.steps[0], m.steps[m.steps.length - 1], edge.left, width - edge.right, state.logX);
    const pad = state.logY ? 0 : (high - low) * 0.04;
    const y = scaleOf(low - pad, high + pad, height - edge.bottom, edge.top, state.logY);
    for (const t of y.ticks(6)) {
      make(svg, "line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y(t), y2: y(t) });
      make(svg, "text", { x: edge.left - 7, y: y(t) + 4, "text-anchor": "end" }, worded(t));
    }
    for (const t of x.ticks(width < 500 ? 4 : 8)) {
      make(svg, "line", { class: "axis", x1: x(t), x2: x(t), y1: height - edge.bottom, y2: height - edge.bottom + 4 });
      make(svg, "text", { x: x(t), y: height - edge.bottom + 18, "text-anchor": x(t) > width - 30 ? "end" : "middle" }, worded(t));
    }
    make(svg, "line", { class: "axis", x1: edge.left, x2: width - edge.right, y1: height - edge.bottom, y2: height - edge.bottom });
    make(svg, "text", { x: (edge.left + width - edge.right) / 2, y: height - 4, "text-anchor": "middle" }, "step");
    make(svg, "text", { x: edge.left, y: 14, class: "name" }, m.name);
    const clip = make(make(svg, "defs"), "clipPath", { id: "inside" });
    make(clip, "rect", { x: edge.left, y: edge.top - 4, width: width - edge.left - edge.right, height: height - edge.top - edge.bottom + 4 });
    const inside = make(svg, "g", { "clip-path": "url(#inside)" });
    let broken = false;
    for (const line of lines) {
      const faint = state.on !== null && state.on !== line.g;
      const known = m.steps.map((s, i) => i).filter((i) => usable(line.mid[i]));
      if (line.low) {
        const spread = known.filter((i) => usable(line.low[i]));
        const points = [...spread.map((i) => `${x(m.steps[i])},${y(line.high[i])}`), ...spread.reverse().map((i) => `${x(m.steps[i])},${y(line.low[i])}`)];
        make(inside, "polygon", { points: points.join(" "), fill: colors[line.g], opacity: faint ? 0.04 : 0.16 });
      }
      let path = "", down = false;
      line.mid.forEach((v, i) => {
        if (usable(v)) { path += `${down ? "L" : "M"}${x(m.steps[i]).toFixed(1)} ${y(v).toFixed(1)}`; down = true; }
        else if (v === "nan") {
          if (down) { // mark where a curve stops being finite
            const p = [...path.matchAll(/([\d.-]+) ([\d.-]+)/g)].pop();
            make(inside, "path", { d: `M${p[1] - 4} ${p[2] - 4}l8 8m0 -8l-8 8`, stroke: colors[line.g], "stroke-width": 2 });
            broken = true;
          }
          down = false;
        }
      });
      make(inside, "path", { d: path, fill: "none", stroke: colors[line.g], "stroke-width": state.on === line.g ? 2.6 : 1.6,
        "stroke-linejoin": "round", opacity: faint ? 0.2 : 1 });
      if (known.length === 1) make(inside, "circle", { cx: x(m.steps[known[0]]), cy: y(line.mid[known[0]]), r: 3, fill: colors[line.g] });
    }
    const rule = make(svg, "line", { class: "axis", y1: edge.top, y2: height - edge.bottom, visibility: "hidden", "stroke-dasharray": "3 3" });
    const notes = [];
    if (!state.single && lines.some((l) => l.low)) notes.push("Lines are means over seeds; bands reach from minimum to maximum.");
    if (m.thinned > 1) notes.push(`Each point is the mean of ${m.thinned} recorded steps.`);
    if (cut) notes.push("Some values are above the axis; tick \"log values\" to see them.");
    if (broken) notes.push("× marks where a value is not finite.");
    note.textContent = notes.join(" ");
    svg.onpointerleave = () => { tip.hidden = true; rule.setAttribute("visibility", "hidden"); };
    svg.onpointermove = svg.onpointerdown = (event) => {
      const box = svg.getBoundingClientRect(), px = ((event.clientX - box.left) * width) / box.width;
      let i = 0;
      m.steps.forEach((s, k) => { if (Math.abs(x(s) - px) < Math.abs(x(m.steps[i]) - px)) i = k; });
      const at = lines.filter((l) => l.mid[i] !== null).sort((a, b) => (usable(a.mid[i]) ? a.mid[i] : Infinity) - (usable(b.mid[i]) ? b.mid[i] : Infinity));
      tip.replaceChildren();
      make(tip, "div", {}, `step ${worded(m.steps[i])}`);
      for (const l of at.slice(0, 10)) {
        const row = make(tip, "div");
        make(row, "i", { class: "key", style: `background:${colors[l.g]}` });
        make(row, "span", {}, l.label);
        make(row, "b", {}, worded(l.mid[i]) + (l.low && l.n[i] > 1 ? ` [${worded(l.low[i])}, ${worded(l.high[i])}]` : ""));
      }
      if (at.length > 10) make(tip, "div", {}, `and ${at.length - 10} more`);
      tip.hidden = false;
      const left = x(m.steps[i]);
      rule.setAttribute("x1", left); rule.setAttribute("x2", left); rule.setAttribute("visibility", "visible");
      tip.style.top = "8px";
      tip.style.left = `${Math.max(0, left > width / 2 ? left - tip.offsetWidth - 12 : Math.min(left + 12, width - tip.offsetWidth))}px`;
    };
  }
  redrawn(chart, draw);
}

function parallel(root) {
  const axes = data.parallel.axes, runs = data.runs;
  const box = make(root, "div", { class: "wide chart" });
  const tools = make(root, "div", { class: "tools" });
  const note = make(tools, "span", { "aria-live": "polite" });
  const reset = make(tools, "button", { type: "button", hidden: "" }, "show all");
  const goodness = goodnessOf(axes[axes.length - 1].values);
  const brushes = new Map();
  let chosen = null;
  reset.onclick = () => { brushes.clear(); chosen = null; draw(); };

  function draw() {
    const width = Math.max(box.clientWidth, 96 * axes.length), height = 312, top = 52, bottom = height - 44;
    const lead = axes[0].numeric ? 58 : 100;
    const xs = axes.map((_, i) => lead + (i * (width - lead - 54)) / Math.max(1, axes.length - 1));
    box.replaceChildren();
    const svg = make(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "parallel coordinates", style: `width:${width}px` });
    const scales = axes.map((axis) => {
      const missing = axis.missing === "above" ? top - 16 : bottom + 26;
      const numbers = axis.values.filter((v) => typeof v === "number");
      const words = [...new Set(axis.values.filter((v) => v !== null).map(String))];
      if (axis.numeric) {
        const scale = scaleOf(Math.min(...numbers), Math.max(...numbers), bottom, top, axis.log);
        const few = [...new Set(numbers)].sort((a, b) => a - b);
        return { at: (v) => (v === null ? missing : scale(v)), ticks: few.length <= 6 ? few : scale.ticks(5) };
      }
      const step = (bottom - top) / Math.max(1, words.length - 1);
      return { at: (v) => (v === null ? missing : words.length === 1 ? (top + bottom) / 2 : bottom - words.indexOf(String(v)) * step), ticks: words };
    });
    const visible = runs.map((_, r) => [...brushes].every(([a, [from, to]]) => { const p = scales[a].at(axes[a].values[r]); return p >= from && p <= to; }));
    const order = [...runs.keys()].sort((a, b) => visible[a] - visible[b] || (goodness[a] ?? -1) - (goodness[b] ?? -1));
    if (chosen !== null) order.push(order.splice(order.indexOf(chosen), 1)[0]);
    for (const r of order) {
      const d = axes.map((axis, i) => `${i ? "L" : "M"}${xs[i].toFixed(1)} ${scales[i].at(axis.values[r]).toFixed(1)}`).join("");
      const strong = chosen === null ? visible[r] : chosen === r;
      const stroke = goodness[r] === null ? "var(--soft)" : `color-mix(in oklab, var(--good) ${Math.round(goodness[r] * 100)}%, var(--bad))`;
      make(svg, "path", { d, fill: "none", stroke, "stroke-width": chosen === r ? 3.2 : 1.6, opacity: strong ? 0.9 : 0.12, "stroke-dasharray": goodness[r] === null ? "4 3" : "none" });
      const wide = make(svg, "path", { d, fill: "none", stroke: "transparent", "stroke-width": 11, style: "cursor:pointer" });
      make(wide, "title", {}, runs[r]);
      wide.onclick = () => { chosen = chosen === r ? null : r; draw(); };
    }
    axes.forEach((axis, i) => {
      make(svg, "line", { class: "axis", x1: xs[i], x2: xs[i], y1: top, y2: bottom });
      if (axis.values.includes(null)) make(svg, "text", { x: xs[i], y: axis.missing === "above" ? top - 20 : bottom + 40, "text-anchor": "middle" }, "none");
      const name = axis.label.length > 15 ? axis.label.slice(0, 14) + "…" : axis.label;
      const title = make(svg, "text", { class: "name", x: xs[i], y: 18, "text-anchor": "middle" }, name);
      make(title, "title", {}, axis.name);
      for (const t of scales[i].ticks) {
        const words = worded(t);
        const side = i ? { x: xs[i] + 6 } : { x: xs[i] - 6, "text-anchor": "end" };
        const halo = "paint-order:stroke;stroke:var(--card);stroke-width:4px";
        make(svg, "text", { ...side, y: scales[i].at(t) + 4, style: halo }, words.length > 14 ? words.slice(0, 13) + "…" : words);
      }
      const brush = brushes.get(i);
      if (brush) make(svg, "rect", { x: xs[i] - 7, width: 14, y: brush[0], height: Math.max(2, brush[1] - brush[0]), fill: "var(--accent)", opacity: 0.3 });
      const grip = make(svg, "rect", { x: xs[i] - 13, width: 26, y: top - 22, height: bottom - top + 56, fill: "transparent", style: "cursor:ns-resize;touch-action:none" });
      grip.onpointerdown = (event) => {
        const place = (e) => ((e.clientY - svg.getBoundingClientRect().top) * height) / svg.getBoundingClientRect().height;
        const from = place(event);
        grip.setPointerCapture(event.pointerId);
        let to = from;
        grip.onpointermove = (e) => { to = place(e); };
        grip.onpointerup = () => {
          Math.abs(to - from) < 4 ? brushes.delete(i) : brushes.set(i, [Math.min(from, to), Math.max(from, to)]);
          draw();
        };
      };
    });
    const count = visible.filter(Boolean).length;
    note.textContent = chosen !== null ? `${runs[chosen]}: ` + axes.map((a) => `${a.label} = ${worded(a.values[chosen])}`).join(", ")
      : brushes.size ? `${count} of ${runs.length} runs: ` + runs.filter((_, r) => visible[r]).slice(0, 8).join(", ") + (count > 8 ? ", …" : "")
      : "Click a line to see its run; drag along an axis to select runs.";
    reset.hidden = chosen === null && !brushes.size;
    for (const tr of document.querySelectorAll("tr[data-run]")) {
      tr.classList.toggle("chosen", +tr.dataset.run === chosen);
      tr.classList.toggle("dim", !visible[+tr.dataset.run]);
    }
  }
  redrawn(box, draw);
}

function redrawn(node, draw) {
  let width = 0;
  new ResizeObserver(() => { if (node.clientWidth !== width) { width = node.clientWidth; draw(); } }).observe(node);
  width = node.clientWidth;
  draw();
}

function sortable(table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.dataset.sort = "";
    head.onclick = () => {
      const down = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down === 1 ? "ascending" : "descending");
      const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const compare = (a, b) => {
        if (a === "" || b === "") return (a === "") - (b === ""); // missing values come last
        const x = Number(a), y = Number(b);
        return down * (Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y);
      };
      [...body.rows].sort((a, b) => compare(key(a), key(b))).forEach((row) => body.append(row));
    };
  });
}

if (data.metrics.length) curves(document.getElementById("curves"));
if (data.parallel) parallel(document.getElementById("parallel"));
document.querySelectorAll("table.sortable").forEach(sortable);
