"use strict";

const facts = JSON.parse(document.getElementById("facts").textContent);
const hidden = new Set();
let view = null; // the range of x that is shown; null is all of it
let isLog = false;
let at = null; // the x under the pointer

const MARGIN = { right: 12, top: 10, bottom: 24 };
const PAD = 12; // room for the marks at both ends of x
const MOST_LINES = 18;
const KINDS = {
  resume: ["resumes", "M-4,-4.5L4.5,0L-4,4.5Z"],
  back: ["went back", "M4,-4.5L-4.5,0L4,4.5Z"],
  preempted: ["preemptions", "M-4,-4H4V4H-4Z"],
  failed: ["failures", "M-4,-4L-2,-4L0,-1.5L2,-4L4,-4L1.5,0L4,4L2,4L0,1.5L-2,4L-4,4L-1.5,0Z"],
};
const SHAPES = [
  "M3.5,0A3.5,3.5 0 1 1 -3.5,0A3.5,3.5 0 1 1 3.5,0Z", "M-3,-3H3V3H-3Z", "M0,-4.5L4.5,0L0,4.5L-4.5,0Z",
  "M0,-4.5L4.5,3.5H-4.5Z", "M-4.5,-3.5H4.5L0,4.5Z", "M-4,0L-2,-3.5H2L4,0L2,3.5H-2Z",
];
const STAR = "M0,-8L2.1,-2.6L7.6,-2.5L3.3,1.1L4.7,6.5L0,3.4L-4.7,6.5L-3.3,1.1L-7.6,-2.5L-2.1,-2.6Z";

function element(parent, name, attributes = {}, text = "") {
  const isDrawn = parent.namespaceURI.endsWith("svg") || name === "svg";
  const made = isDrawn ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  return parent.appendChild(made);
}

const colour = (index) => `var(--run${index % 6})`;
const isNumber = (value) => typeof value === "number";
const shownRuns = () => facts.runs.map((run, index) => [run, index]).filter(([, index]) => !hidden.has(index));
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function whole() {
  const ends = facts.runs.flatMap((run) => [run.x[0], run.x.at(-1), ...run.events.map((event) => event.x)]);
  const known = ends.filter(isNumber);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  return low < high ? [low, high] : [low - 1, low + 1];
}

// Text of numbers

function brief(value, digits = 4) {
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  return String(Number(value.toPrecision(Math.max(digits, size >= 1e4 ? 6 : 0))));
}

const whole_number = (value) => value.toLocaleString("en-US");
const seconds = (value) => `${brief(value, 3)} s`;
const moment = (value) => new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ");

function steps(low, high, count, least = 0) {
  const rough = Math.max((high - low) / count, least);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * power >= rough * (1 - 1e-9)) * power;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function decades(low, high) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const stride = Math.ceil((last - first) / 6);
  const within = (parts) => {
    const found = [];
    for (let power = first; power <= last; power += stride) found.push(...parts.map((part) => part * 10 ** power));
    return found.filter((value) => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9));
  };
  const found = within([1]);
  return found.length > 1 ? found : within([1, 2, 5]).length > 2 ? within([1, 2, 5]) : steps(low, high, 5);
}

// Charts

class Chart {
  constructor(figure) {
    const key = figure.dataset.series;
    this.figure = figure;
    this.values = key.startsWith("metric ") ? (run) => run.metrics[Number(key.slice(7))] : (run) => run[key];
    this.metric = key.startsWith("metric ") ? Number(key.slice(7)) : null;
    this.node = figure.querySelector("svg");
    this.hint = figure.querySelector("figcaption span");
    listen(this);
  }

  draw() {
    const { width, height } = this.node.getBoundingClientRect();
    if (!width) return;
    this.node.replaceChildren();
    const [from, to] = view ?? whole();
    const curves = shownRuns().map(([run, index]) => ({ run, index, points: this.points(run) }));
    const inside = curves.flatMap((one) => one.points.filter(([x]) => x >= from && x <= to).map(([, y]) => y));
    const marks = this.range(inside);
    const digits = 4 + Math.max(0, Math.ceil(Math.log10(Math.abs(marks.high) / (marks.high - marks.low) / 100)));
    const labels = marks.ticks.map((value) => brief(value, isLog ? 2 : Math.min(digits, 9)));
    const left = Math.max(38, 12 + 6.4 * Math.max(0, ...labels.map((text) => text.length)));
    this.area = { left, top: MARGIN.top, width: width - left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    this.from = from;
    this.to = to;
    this.axes(marks, labels);
    const { area } = this;
    const box = { x: left, y: 0, width: area.width, height: height - MARGIN.bottom + 8, overflow: "hidden" };
    this.inner = element(element(this.node, "svg", box), "g", { transform: `translate(${-left},0)` });
    this.events();
    for (const curve of curves) this.curve(curve);
    if (!inside.length) {
      const place = { x: left + area.width / 2, y: area.top + area.height / 2, "text-anchor": "middle", class: "none" };
      element(this.node, "text", place, curves.length ? "no value here" : "all runs are hidden");
    }
    this.over = element(this.node, "g");
    this.point();
  }

  points(run) {
    const found = [];
    this.values(run).forEach((y, i) => {
      if (isNumber(y) && (!isLog || y > 0)) found.push([run.x[i], y, i]);
    });
    return found;
  }

  range(values) {
    let low = values.reduce((least, value) => Math.min(least, value), Infinity);
    let high = values.reduce((most, value) => Math.max(most, value), -Infinity);
    if (low > high) [low, high] = [isLog ? 0.1 : 0, 1];
    if (isLog) {
      const room = Math.max((high / low) ** 0.05, 1.05);
      [low, high] = [low / room, high * room];
      const [first, last] = [Math.log10(low), Math.log10(high)];
      this.up = (y) => this.area.top + this.area.height * (1 - (Math.log10(y) - first) / (last - first));
      return { low, high, ticks: decades(low, high) };
    }
    const isCost = this.metric === null;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    [low, high] = [isCost ? 0 : low - room, high + room];
    this.up = (y) => this.area.top + this.area.height * (1 - (y - low) / (high - low));
    return { low, high, ticks: steps(low, high, 5) };
  }

  across(x) {
    return this.area.left + PAD + ((this.area.width - 2 * PAD) * (x - this.from)) / (this.to - this.from);
  }

  axes(marks, labels) {
    const { left, top, width, height } = this.area;
    marks.ticks.forEach((value, i) => {
      const y = this.up(value).toFixed(1);
      element(this.node, "line", { class: "grid", x1: left, x2: left + width, y1: y, y2: y });
      element(this.node, "text", { x: left - 6, y, dy: "0.32em", "text-anchor": "end", class: "y" }, labels[i]);
    });
    const name = facts.x === "step" ? "step" : "save";
    element(this.node, "text", { x: left - 6, y: top + height + 17, "text-anchor": "end" }, name);
    for (const value of steps(this.from, this.to, clamp(width / 90, 2, 8), 1)) {
      const x = this.across(value);
      const text = whole_number(Math.round(value));
      const half = text.length * 3.2;
      const place = { x: clamp(x, left + half - 2, left + width + MARGIN.right - half), y: top + height + 17, "text-anchor": "middle" };
      element(this.node, "text", { ...place, class: "x" }, text);
      element(this.node, "line", { class: "grid", x1: x, x2: x, y1: top + height, y2: top + height + 4 });
    }
  }

  curve({ run, index, points }) {
    const own = points.filter(([, , i]) => !run.left.has(i));
    const place = ([x, y]) => `${this.across(x).toFixed(1)},${this.up(y).toFixed(1)}`;
    const first = Math.max(0, own.findIndex(([x]) => x >= this.from) - 1);
    const past = own.findIndex(([x]) => x > this.to);
    const seen = own.slice(first, past < 0 ? own.length : past + 1);
    const isDense = seen.length > this.area.width / 14;
    const width = seen.length > this.area.width ? 1 : 1.6;
    const look = { class: "curve", stroke: colour(index), "stroke-width": width, "data-run": index };
    if (seen.length > 1) element(this.inner, "path", { ...look, d: `M${seen.map(place).join("L")}` });
    const left = this.branches(run, points, place);
    if (left) element(this.inner, "path", { ...look, class: "curve left", d: left });
    if (!isDense) {
      for (const point of points.filter(([, , i]) => run.left.has(i))) {
        this.mark(place(point), SHAPES[index % 6], { fill: "var(--page)", stroke: colour(index) });
      }
    }
    // A mark on each of very many points would hide the curve.
    for (const point of isDense ? seen.slice(-1) : seen) this.mark(place(point), SHAPES[index % 6], { fill: colour(index) });
    const best = points.find(([, , i]) => run.number[i] === run.best);
    if (best && this.metric !== null && this.metric === run.goal) this.mark(place(best), STAR, { fill: colour(index) });
    this.odd(run, index);
  }

  branches(run, points, place) {
    const there = new Map(points.map((point) => [point[2], point]));
    let [d, last] = ["", null];
    for (const [before, after] of run.branches) {
      const [one, other] = [there.get(before), there.get(after)];
      if (!one || !other) continue;
      d += `${before === last ? "" : `M${place(one)}`}L${place(other)}`;
      last = after;
    }
    return d;
  }

  odd(run, index) {
    const { top, height } = this.area;
    this.values(run).forEach((value, i) => {
      if (typeof value !== "string") return;
      const place = `${this.across(run.x[i]).toFixed(1)},${top + height - 5}`;
      this.mark(place, SHAPES[2], { fill: "var(--page)", stroke: colour(index), "data-odd": value });
    });
  }

  mark(place, d, look, parent = this.inner) {
    element(parent, "path", { class: "mark", stroke: "var(--page)", ...look, d, transform: `translate(${place})` });
  }

  events() {
    const { top, height } = this.area;
    for (const [run, index] of shownRuns()) {
      for (const event of run.events.filter((one) => !hidden.has(one.kind))) {
        const x = this.across(event.x).toFixed(1);
        element(this.inner, "line", { class: "event", x1: x, x2: x, y1: top, y2: top + height });
        // A resume is often where the attempt before it has ended.
        const aside = Number(x) + (["resume", "back"].includes(event.kind) ? 5 : -5);
        this.mark(`${aside},${top - 1}`, KINDS[event.kind][1], { fill: colour(index), "data-kind": event.kind });
      }
    }
  }

  // What is under the pointer: a line, and a mark on each curve.
  point() {
    this.over.replaceChildren();
    this.hint.textContent = "";
    if (at === null || at < this.from || at > this.to) return;
    const { top, height } = this.area;
    const x = this.across(at);
    element(this.over, "line", { class: "cross", x1: x, x2: x, y1: top, y2: top + height });
    const texts = [];
    for (const [run, index] of shownRuns()) {
      const i = nearest(run, at);
      const y = i === null ? null : this.values(run)[i];
      if (y !== null) texts.push(isNumber(y) ? (this.metric === null ? seconds(y) : brief(y, 6)) : y);
      if (!isNumber(y) || (isLog && y <= 0)) continue;
      const place = `${this.across(run.x[i])},${this.up(y)}`;
      this.mark(place, SHAPES[index % 6], { fill: colour(index) }, this.over);
    }
    this.hint.textContent = texts.length ? ` ${texts.join(" · ")}` : "";
  }

  x_of(event) {
    const box = this.node.getBoundingClientRect();
    const share = clamp((event.clientX - box.x - this.area.left - PAD) / (this.area.width - 2 * PAD), 0, 1);
    return this.from + share * (this.to - this.from);
  }
}

// The last save of those at one x: those before it were abandoned.
function nearest(run, x) {
  if (!run.x.length || x < run.x[0] || x > run.x.at(-1)) return null;
  let [low, high] = [0, run.x.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (run.x[middle] <= x) low = middle + 1;
    else high = middle;
  }
  const before = low - 1;
  return low < run.x.length && run.x[low] - x < x - run.x[before] ? last_at(run, run.x[low]) : before;
}

function last_at(run, x) {
  let i = run.x.indexOf(x);
  while (run.x[i + 1] === x) i++;
  return i;
}

// Pointer, touch and keys

function point_at(x, place) {
  let found = null;
  for (const [run] of shownRuns()) {
    const i = x < run.x[0] ? 0 : x > run.x.at(-1) ? run.x.length - 1 : nearest(run, x);
    if (i !== null && run.x.length && (found === null || Math.abs(run.x[i] - x) < Math.abs(found - x))) found = run.x[i];
  }
  at = found;
  for (const chart of charts) chart.point();
  tell(place);
}

function leave() {
  at = null;
  for (const chart of charts) chart.point();
  tip.hidden = true;
}

function zoom(range) {
  view = range;
  reset.hidden = view === null;
  leave();
  for (const chart of charts) chart.draw();
}

function listen(chart) {
  const { node } = chart;
  let start = null;
  let box = null;
  node.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "mouse" && event.button === 0) {
      start = chart.x_of(event);
      node.setPointerCapture(event.pointerId);
    }
    point_at(chart.x_of(event), event);
  });
  node.addEventListener("pointermove", (event) => {
    const x = chart.x_of(event);
    point_at(x, event);
    if (start === null) return;
    box?.remove();
    const [left, right] = [start, x].sort((one, other) => one - other).map((one) => chart.across(one));
    const { top, height } = chart.area;
    box = element(chart.over, "rect", { class: "zoom", x: left, width: right - left, y: top, height });
  });
  node.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const range = [start, chart.x_of(event)].sort((one, other) => one - other);
    [start, box] = [null, null];
    if (chart.across(range[1]) - chart.across(range[0]) > 6) zoom(range);
  });
  node.addEventListener("pointerleave", () => start === null && leave());
  node.addEventListener("dblclick", () => zoom(null));
  node.addEventListener("blur", leave);
  node.addEventListener("keydown", (event) => press(chart, event));
}

function press(chart, event) {
  const [low, high] = view ?? whole();
  const middle = at ?? (low + high) / 2;
  const by = (factor) => [middle - (middle - low) * factor, middle + (high - middle) * factor];
  const move = (way) => {
    const places = shownRuns().flatMap(([run]) => run.x).filter((x) => x >= low && x <= high);
    const ahead = places.filter((x) => at === null || (way > 0 ? x > at : x < at));
    const next = ahead.length ? (way > 0 ? Math.min(...ahead) : Math.max(...ahead)) : at;
    if (next === null) return;
    const box = chart.node.getBoundingClientRect();
    point_at(next, { clientX: box.x + chart.across(next), clientY: box.y + 20 });
  };
  const keys = {
    ArrowRight: () => move(1), ArrowLeft: () => move(-1), Escape: () => (view ? zoom(null) : leave()),
    "+": () => zoom(by(0.5)), "-": () => zoom(by(2)[0] <= whole()[0] && by(2)[1] >= whole()[1] ? null : by(2)),
  };
  if (!keys[event.key]) return;
  event.preventDefault();
  keys[event.key]();
}

// The box with all that is known at one place

const tip = element(document.body, "div", { id: "tip", role: "status", hidden: "" });

function tell(place) {
  tip.replaceChildren();
  tip.hidden = at === null;
  if (at === null) return;
  const found = shownRuns().map(([run, index]) => ({ run, index, i: nearest(run, at) })).filter(({ i }) => i !== null);
  const table = element(tip, "table");
  const head = element(element(table, "thead"), "tr");
  element(head, "th", {}, `${facts.x} ${whole_number(at)}`);
  for (const { run, index, i } of found) {
    const cell = element(head, "th");
    element(cell, "i").style.background = colour(index);
    const name = facts.runs.length > 1 ? run.name : `checkpoint ${run.number[i]}`;
    cell.append(run.x[i] === at ? name : `${name}, ${facts.x} ${whole_number(run.x[i])}`);
  }
  const body = element(table, "tbody");
  for (const [title, cells] of lines(found)) {
    const row = element(body, "tr");
    element(row, "th", {}, title);
    for (const text of cells) element(row, "td", {}, text);
  }
  for (const [run, index] of shownRuns()) {
    for (const event of run.events) {
      if (hidden.has(event.kind) || event.x !== at) continue;
      const line = element(tip, "p");
      element(line, "i").style.background = colour(index);
      line.append(facts.runs.length > 1 ? `${run.name}: ${event.text}` : event.text);
    }
  }
  put(place);
}

function lines(found) {
  const all = (read) => found.map(({ run, i }) => read(run, i) ?? "");
  const number = (value) => (isNumber(value) ? brief(value, 6) : value);
  const time = (value) => value === null ? "" : seconds(value);
  const rows = [
    ...(facts.runs.length > 1 ? [["checkpoint", all((run, i) => run.number[i])]] : []),
    ["", all((run, i) => run.state[i])],
    ["epoch, batch", all((run, i) => run.epoch[i] === null ? "" : `${run.epoch[i]}, ${run.batch[i]}`)],
    ...facts.metrics.slice(0, MOST_LINES).map((name, m) => [name, all((run, i) => number(run.metrics[m][i]))]),
    ["held up", all((run, i) => time(run.held[i]))],
    ["durable after", all((run, i) => time(run.durable[i]))],
    ["why", all((run, i) => run.why[i])],
    ["saved, UTC", all((run, i) => run.time[i] === null ? "" : moment(run.time[i]))],
  ];
  return rows.filter(([, cells]) => cells.some((text) => text !== ""));
}

function put({ clientX, clientY }) {
  tip.classList.toggle("up", clientY > innerHeight / 2);
  const { width, height } = tip.getBoundingClientRect();
  const left = clientX + 18 + width > innerWidth ? clientX - 18 - width : clientX + 18;
  tip.style.left = `${clamp(left, 8, Math.max(8, innerWidth - width - 8))}px`;
  tip.style.top = `${clamp(clientY + 18, 8, Math.max(8, innerHeight - height - 8))}px`;
}

// The bar above the charts, and the theme

function toggle(bar, key, text, d, fill) {
  const button = element(bar, "button", { type: "button", "aria-pressed": "true" });
  element(element(button, "svg", { viewBox: "-5 -5 10 10", "aria-hidden": "true" }), "path", { d, fill });
  button.append(text);
  button.addEventListener("click", () => {
    if (!hidden.delete(key)) hidden.add(key);
    button.setAttribute("aria-pressed", String(!hidden.has(key)));
    zoom(view);
  });
}

function fill(bar) {
  if (facts.runs.length > 1) {
    facts.runs.forEach((run, index) => toggle(bar, index, run.name, SHAPES[index % 6], colour(index)));
  }
  const there = new Set(facts.runs.flatMap((run) => run.events.map((event) => event.kind)));
  for (const [kind, [text, d]] of Object.entries(KINDS)) {
    if (there.has(kind)) toggle(bar, kind, text, d, "currentColor");
  }
  const log = element(bar, "button", { type: "button", class: "plain", "aria-pressed": "false" }, "Log scale");
  log.addEventListener("click", () => {
    isLog = !isLog;
    log.setAttribute("aria-pressed", String(isLog));
    zoom(view);
  });
  const all = element(bar, "button", { type: "button", hidden: "" }, `Show every ${facts.x}`);
  all.addEventListener("click", () => zoom(null));
  element(bar, "span", { class: "quiet" }, "drag to zoom, double-click to reset; keys: arrows, +, -, Esc");
  return all;
}

function theme(button) {
  const root = document.documentElement;
  const isDark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = isDark() ? "Light colours" : "Dark colours"; };
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    name();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
  button.hidden = false;
  name();
}

theme(document.getElementById("theme"));
for (const run of facts.runs) run.left = new Set(run.branches.map(([, i]) => i));
const bar = document.querySelector(".bar");
const reset = bar && fill(bar);
const charts = [...document.querySelectorAll("figure[data-series]")].map((figure) => new Chart(figure));
const main = document.querySelector("main");
let drawn_for = 0;
// It calls at once, too; a change of height is no reason to draw.
new ResizeObserver(() => {
  if (drawn_for === main.clientWidth) return;
  drawn_for = main.clientWidth;
  charts.forEach((chart) => chart.draw());
}).observe(main);
