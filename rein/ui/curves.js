"use strict";
// Draws the curves that stand in the page as JSON; the same looks as report.html, and several runs on one chart.

const color = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const lineInks = { alone: ["accent", "second", "third"], together: ["c0", "c1", "c2", "c3", "c4", "c5"] };
const dashes = ["solid", "dash", "dot"];
const inks = { rollback: "bad", round: "third", action: "second", alert: "quiet" };
const markDashes = { rollback: "solid", round: "dashdot", action: "dash", alert: "dot" };

function layoutOf(chart, marks, undone) {
  const last = Math.max(...[...chart.lines, { x: marks.map(mark => mark.x) }].map(line => line.x.at(-1) ?? 0));
  const axis = { gridcolor: color("grid"), linecolor: color("line"), zerolinecolor: color("line"), automargin: true };
  return {
    margin: { l: 46, r: 12, t: 8, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: color("quiet") },
    showlegend: chart.lines.length > 1 && chart.lines.length <= 6,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { color: color("ink") } },
    hovermode: "x unified",
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink") } },
    xaxis: { ...axis, title: { text: chart.x_title, standoff: 6 }, rangemode: "nonnegative" },
    yaxis: { ...axis, type: chart.log ? "log" : "linear", tickformat: "~g", ...rangeOf(chart) },
    yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
    shapes: marks.length ? [...undone.map(undoneOf), ...marks.map(lineOf)] : [],
    annotations: marks.filter(mark => mark.label).map((mark, i) => labelOf(mark, i, mark.x > .7 * last)),
    uirevision: "kept", // a zoom stays when new points come
  };
}

function lineOf(mark) {
  const line = { color: color(inks[mark.kind]), width: mark.kind === "rollback" ? 1.6 : 1, dash: markDashes[mark.kind] };
  return { type: "line", yref: "paper", x0: mark.x, x1: mark.x, y0: 0, y1: 1, line };
}

function undoneOf([from, to]) {
  return { type: "rect", yref: "paper", x0: from + .5, x1: to + .5, y0: 0, y1: 1, fillcolor: color("card"), opacity: .6, line: { width: 0 } };
}

function labelOf(mark, i, late) {
  return {
    x: mark.x, yref: "paper", y: 1 - .1 * (i % 3), text: mark.label, showarrow: false, yanchor: "top", xanchor: late ? "right" : "left",
    font: { size: 11, color: color(inks[mark.kind]) }, bgcolor: color("card"), opacity: .85,
  };
}

function traceOf(marks) {
  return {
    x: marks.map(mark => mark.x), y: marks.map(() => 1), yaxis: "y2", name: "guards", mode: "markers", showlegend: false, cliponaxis: false,
    marker: { symbol: "triangle-down", size: 8, color: marks.map(mark => color(inks[mark.kind])) },
    text: marks.map(mark => mark.text), hovertemplate: "%{text}<extra></extra>",
  };
}

function rangeOf(chart) {
  const all = chart.lines.flatMap(line => line.y), first = all[0];
  return all.every(y => y === first) && !chart.log ? { range: first ? [0, 2 * first].sort((a, b) => a - b) : [-1, 1] } : {};
}

function tracesOf(chart) {
  return chart.lines.map((line, i) => ({
    x: line.x, y: line.y, name: line.label, mode: line.x.length > 40 ? "lines" : "lines+markers",
    line: { color: color("color" in line ? lineInks.together[line.color] : lineInks.alone[i % 3]), width: 1.8, dash: dashes[(line.dash ?? i) % 3] },
    marker: { size: 5 }, hovertemplate: "%{y:.5~g}",
  }));
}

function draw(place) {
  const chart = known.charts[place.dataset.stage][Number(place.dataset.index)];
  const marks = place.dataset.stage === "train" && known.guards.marks || [];
  const traces = marks.length ? [...tracesOf(chart), traceOf(marks)] : tracesOf(chart);
  Plotly.react(place, traces, layoutOf(chart, marks, known.guards.undone ?? []), { responsive: true, displayModeBar: false });
}

// A curve is drawn when it comes into sight, and drawn anew while it is there.
let known = null;
const near = new IntersectionObserver(seen => {
  for (const { isIntersecting, target } of seen) {
    if (isIntersecting && target.dataset.drawn !== "now") draw(target);
    target.dataset.drawn = isIntersecting ? "now" : "";
  }
}, { rootMargin: "300px" });

window.drawCurves = () => {
  if (!window.Plotly) return;
  known = JSON.parse(document.getElementById("charts").textContent);
  for (const place of document.querySelectorAll(".plot")) {
    if (place.dataset.drawn === "now") draw(place);
    else near.observe(place);
  }
};

// Plotly comes when the page is there. Its own style elements get this page's nonce, as its policy asks.
const { nonce } = document.currentScript;
const create = document.createElement;
document.createElement = function (name, ...more) {
  const element = create.call(this, name, ...more);
  if (["style", "script"].includes(String(name).toLowerCase())) element.nonce = nonce;
  return element;
};
addEventListener("load", () => {
  const plotly = document.createElement("script");
  plotly.src = "/static/plotly.js";
  plotly.addEventListener("load", window.drawCurves);
  document.head.append(plotly);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", window.drawCurves);
