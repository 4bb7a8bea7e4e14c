"use strict";
(() => {
  const { runs, charts } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const plots = [...document.querySelectorAll("[data-chart]")];
  const coarse = matchMedia("(pointer: coarse)").matches;
  const hidden = { run: new Set(), kind: new Set() };
  let isLog = false;
  let isFollowing = false;

  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const runColor = (index) => color("run-" + (index % 6));
  const symbols = ["circle", "square", "diamond", "triangle-up", "hexagon", "pentagon"];
  const marks = {
    best: ["star", 15], resume: ["triangle-right", 11], back: ["triangle-left", 11],
    preempted: ["square", 9], failed: ["x", 9], odd: ["diamond-open", 9],
  };
  const names = { lost: "held up", durable: "durable after", own: "not shared", shared: "shared with others" };

  // Plotly takes what looks like HTML in a name for HTML.
  const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");

  function styled(trace, chart) {
    const { run, kind } = trace;
    const tint = runs.length > 1 || !marks[kind] ? runColor(run) : color(kind);
    const symbol = symbols[run % symbols.length];
    const is_shown = !hidden.run.has(String(run)) && !hidden.kind.has(kind === "branch" ? "abandoned" : kind);
    const base = { x: trace.x, y: trace.y, visible: is_shown, showlegend: false, hoverinfo: "text", text: trace.text };
    const label = (runs.length > 1 && chart.kind === "cost" ? runs[run] + ": " : "") + (names[kind] || kind);
    if (kind === "curve") return { ...base, mode: "lines", line: { color: tint, width: 2 }, hoverinfo: "skip" };
    if (kind === "branch") {
      return { ...base, mode: "lines", line: { color: tint, width: 1.5, dash: "dot" }, opacity: 0.7, hoverinfo: "skip" };
    }
    if (kind === "own" || kind === "shared") {
      const pattern = kind === "shared" ? { shape: "/", fgcolor: tint, bgcolor: color("page"), size: 6, solidity: 0.25 } : {};
      return {
        ...base, type: "bar", name: plain(label), showlegend: true, textposition: "none",
        marker: { color: tint, pattern, line: { color: tint, width: 1 } },
      };
    }
    if (kind === "lost" || kind === "durable") {
      const form = kind === "lost" ? symbol : symbol + "-open";
      return { ...base, mode: "markers", name: plain(label), showlegend: true, cliponaxis: false, marker: { color: tint, symbol: form, size: 8 } };
    }
    if (kind === "save") return { ...base, mode: "markers", marker: { color: tint, symbol, size: trace.x.length > 100 ? 4 : 7 } };
    if (kind === "abandoned") return { ...base, mode: "markers", marker: { color: tint, symbol: symbol + "-open", size: 7 } };
    const [form, size] = marks[kind];
    const edge = { color: color("page"), width: 1 };
    const marker = { color: tint, symbol: form, size, line: form.endsWith("open") ? { color: tint, width: 2 } : edge };
    // What has no value stands in rows below the curves: what ended the training, and how it went on.
    const place = 2 * (runs.length - run) + (kind === "resume" || kind === "back" ? 0 : 1);
    const row = kind === "best" ? {} : { yaxis: "y2", y: trace.x.map(() => place) };
    return { ...base, ...row, mode: "markers", marker, cliponaxis: false };
  }

  function layoutOf(chart) {
    const line = { gridcolor: color("grid"), linecolor: color("line"), zeroline: false, automargin: true };
    const hasRow = chart.kind === "metric" && chart.traces.some((t) => marks[t.kind] && t.kind !== "best" && t.x.length);
    const axis = { ...line, fixedrange: coarse };
    const height = hasRow ? Math.min(0.45, 0.06 + 0.11 * runs.length) : 0;
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: "same", autosize: true,
      font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", size: 12, color: color("text") },
      margin: { l: 8, r: 12, t: 10, b: 8 }, hovermode: "closest", hoverdistance: 80, dragmode: coarse ? false : "zoom",
      hoverlabel: { bgcolor: color("page"), bordercolor: color("line"), align: "left", font: { color: color("text"), size: 13 } },
      xaxis: { ...axis, title: { text: chart.x, standoff: 6 }, anchor: hasRow ? "y2" : "y", separatethousands: true },
      yaxis: { ...axis, domain: [height, 1] },
    };
    if (hasRow) {
      layout.yaxis2 = { domain: [0, height - 0.03], range: [1.3, 2 * runs.length + 1.7], visible: false, fixedrange: true };
    }
    if (chart.kind === "metric") layout.yaxis.type = isLog ? "log" : "linear";
    // Labels at 1, 2 and 5: those between would overlap.
    if (chart.kind === "metric" && isLog) Object.assign(layout.yaxis, { dtick: "D2", exponentformat: "e" });
    if (chart.kind === "cost") Object.assign(layout.yaxis, { rangemode: "tozero", ticksuffix: " s" });
    if (chart.kind === "sizes") {
      Object.assign(layout.yaxis, { rangemode: "tozero", ticksuffix: "B" });
      layout.barmode = "stack";
      layout.bargap = 0.3;
      const xs = new Set(chart.traces.flatMap((t) => t.x));
      if (xs.size <= 12) layout.xaxis.type = "category";
    }
    if (chart.kind !== "metric") layout.legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, itemclick: "toggle" };
    return layout;
  }

  function draw(place) {
    const chart = charts[Number(place.dataset.chart)];
    const config = { displayModeBar: false, responsive: true, doubleClick: "reset", showTips: false };
    place.classList.toggle("low", chart.kind !== "metric");
    const isNew = !place.classList.contains("js-plotly-plot");
    const drawn = Plotly.react(place, chart.traces.map((t) => styled(t, chart)), layoutOf(chart), config);
    if (isNew && chart.kind === "metric") place.on("plotly_relayout", (change) => follow(place, change));
    return drawn;
  }

  // (one in details that are closed has no width yet)
  const isOpen = (place) => !place.closest("details:not([open])");
  const metricPlots = () => plots.filter((p) => p._fullLayout && charts[Number(p.dataset.chart)].kind === "metric");
  const drawAll = () => Promise.all(plots.filter(isOpen).map(draw));

  // The metrics are looked at over the same steps.
  function follow(place, change) {
    const range = "xaxis.range[0]" in change ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null;
    if (isFollowing || (!range && !change["xaxis.autorange"])) return;
    isFollowing = true;
    const to = range ? { "xaxis.range": range } : { "xaxis.autorange": true, "yaxis.autorange": true };
    const others = metricPlots().filter((other) => other !== place);
    Promise.all(others.map((other) => Plotly.relayout(other, to))).finally(() => { isFollowing = false; });
  }

  function zoom(way) {
    for (const place of metricPlots().slice(0, 1)) {
      const [from, to] = place._fullLayout.xaxis.range;
      const [middle, half] = [(from + to) / 2, (to - from) * (way === "in" ? 0.25 : 1)];
      const range = [middle - half, middle + half];
      Plotly.relayout(place, way === "reset" ? { "xaxis.autorange": true, "yaxis.autorange": true } : { "xaxis.range": range });
    }
  }

  function listen() {
    for (const button of document.querySelectorAll("[data-run], [data-kind]")) {
      const of = "run" in button.dataset ? "run" : "kind";
      button.addEventListener("click", () => {
        const isOn = button.getAttribute("aria-pressed") === "true";
        button.setAttribute("aria-pressed", String(!isOn));
        hidden[of][isOn ? "add" : "delete"](button.dataset[of]);
        drawAll();
      });
    }
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => zoom(button.dataset.zoom));
    }
    const log = document.querySelector("[data-log]");
    log?.addEventListener("click", () => {
      isLog = !isLog;
      log.setAttribute("aria-pressed", String(isLog));
      drawAll();
    });
    for (const details of document.querySelectorAll("details")) {
      details.addEventListener("toggle", () => details.open && drawAll());
    }
    for (const tools of document.querySelectorAll(".tools")) tools.hidden = false;
    // On paper the charts are as wide as it is.
    addEventListener("beforeprint", () => {
      for (const place of plots) if (place._fullLayout) Plotly.relayout(place, { width: 640, height: place.clientHeight });
    });
    addEventListener("afterprint", () => {
      for (const place of plots) if (place._fullLayout) Plotly.relayout(place, { width: null, height: null, autosize: true });
    });
  }

  function tint() {
    for (const button of document.querySelectorAll("[data-run]")) button.querySelector("svg").style.color = runColor(Number(button.dataset.run));
    for (const button of document.querySelectorAll("[data-kind]")) {
      const { kind } = button.dataset;
      button.querySelector("svg").style.color = runs.length > 1 ? color("quiet") : color(marks[kind] ? kind : "run-0");
    }
  }

  root.addEventListener("theme", () => {
    tint();
    if (window.Plotly) drawAll();
  });
  tint();

  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.nonce = document.currentScript?.nonce || nonce;
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }

  const nonce = document.currentScript.nonce;
  load().then(drawAll).then(listen).then(
    () => { root.dataset.drawn = "true"; },
    (error) => {
      for (const place of plots) {
        place.removeAttribute("role");
        place.classList.add("undrawn");
        place.textContent = "The chart cannot be drawn in this browser: " + error.message + ". The tables have its figures.";
      }
    },
  );
})();
