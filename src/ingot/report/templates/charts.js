// Lets a reader explore the charts that html/charts.py has drawn: <figure data-chart='{"x", "y", "series", ...}'>.
// Drag over a chart to zoom; double-click or Escape shows all. Arrow keys move the cursor of a focused chart.
"use strict";
const WIDTH = 480,
  HEIGHT = 260,
  LEFT = 52,
  RIGHT = 14,
  TOP = 22,
  BOTTOM = 40; // as in html/axes.py, in SVG units
const views = new Map(); // chart -> {zoom: [x0, x1] or null, logX, logY}; outlives a redrawing by `report --live`

function element(name, attributes, text) {
  const made = document.createElementNS(document.querySelector("svg").namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// Round values within low .. high, 1, 2 or 5 times a power of ten apart.
function linearTicks(low, high, most) {
  const power = 10 ** Math.floor(Math.log10((high - low) / most));
  const step = [1, 2, 5, 10, 20].map((m) => m * power).find((s) => Math.floor(high / s) - Math.ceil(low / s) < most);
  const first = Math.ceil(low / step - 1e-9),
    last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

// Powers of ten, over few decades also 2 and 5 times these; a range without two of them gets linear ticks.
function logTicks(low, high, most) {
  const decades = Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low));
  const every = Math.ceil(decades / most),
    values = [];
  for (let d = Math.floor(Math.log10(low)); 10 ** d <= high; d += every)
    for (const factor of decades <= 2 ? [1, 2, 5] : [1]) values.push(factor * 10 ** d);
  const inside = values.filter((v) => low <= v && v <= high);
  return inside.length > 1 ? inside : linearTicks(low, high, most);
}

function short(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-2 || size >= 1e9)) return value.toExponential().replace("e+", "e");
  for (const [unit, scale] of [
    ["M", 1e6],
    ["k", 1e3],
  ])
    if (size >= scale) return Number((value / scale).toPrecision(6)) + unit;
  return String(Number(value.toPrecision(6)));
}

// Maps values to pixels of one axis; `values` decide its range.
function scale(values, logarithmic, start, end, margin) {
  const forward = logarithmic ? Math.log10 : (v) => v,
    back = logarithmic ? (v) => 10 ** v : (v) => v;
  let low = Math.min(...values.map(forward)),
    high = Math.max(...values.map(forward));
  const space = (high - low) * margin || (low === high ? Math.abs(low) * 0.1 || 1 : 0);
  const keepsZero = !logarithmic && low === 0; // an axis that starts at zero has no space below it
  [low, high] = [keepsZero ? 0 : low - space, high + space];
  const toPixel = (v) => start + ((forward(v) - low) / (high - low)) * (end - start);
  return Object.assign(toPixel, {
    low: back(low),
    high: back(high),
    invert: (pixel) => back(low + ((pixel - start) / (end - start)) * (high - low)),
    ticks: (most) => (logarithmic ? logTicks : linearTicks)(back(low), back(high), most),
  });
}

function drawChart(figure) {
  const data = JSON.parse(figure.dataset.chart);
  const svg = figure.querySelector("svg"),
    output = figure.querySelector("output");
  const key = figure.closest("[id]").id + "/" + figure.querySelector("figcaption").textContent;
  const view = views.get(key) ?? { zoom: null, logX: data.logX, logY: false };
  views.set(key, view);
  const isPoint = ([x, y]) => typeof y === "number" && (!view.logX || x > 0) && (!view.logY || y > 0);
  let x, y, cursor;

  function draw() {
    const [from, to] = view.zoom ?? [-Infinity, Infinity];
    const isInside = (p) => from <= p[0] && p[0] <= to;
    const all = data.series.flatMap((s) => s.points.filter(isPoint));
    const shown = all.some(isInside) ? all.filter(isInside) : all;
    const heights = shown.map((p) => p[1]);
    if (!view.zoom) heights.push(...data.references.filter((v) => isPoint([1, v])));
    if (data.fromZero && !view.logY) heights.push(0);
    x = scale(view.zoom ?? all.map((p) => p[0]), view.logX, LEFT, WIDTH - RIGHT, 0);
    y = scale(heights, view.logY, HEIGHT - BOTTOM, TOP, 0.05);
    const clip = "clip-" + [...document.querySelectorAll("figure")].indexOf(figure);
    const plot = element("g", { "clip-path": `url(#${clip})` });
    const clipping = element("clipPath", { id: clip });
    clipping.append(element("rect", { x: LEFT, y: 0, width: WIDTH - LEFT - RIGHT, height: HEIGHT - BOTTOM }));
    cursor = element("g", {});
    svg.replaceChildren(clipping, ...axes(), plot, cursor);
    for (const v of data.references.filter((v) => isPoint([1, v])))
      plot.append(element("line", { class: "reference", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }));
    for (const s of data.series) plot.append(...curve(s));
    for (const [name, button] of Object.entries(buttons))
      if (name in view) button.setAttribute("aria-pressed", view[name]);
    buttons.all.hidden = !view.zoom;
  }

  function axes() {
    const bottom = HEIGHT - BOTTOM,
      parts = [];
    for (const v of y.ticks(6)) {
      parts.push(element("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }));
      parts.push(element("text", { x: LEFT - 6, y: y(v) + 4, "text-anchor": "end" }, short(v)));
    }
    for (const v of x.ticks(7)) {
      parts.push(element("line", { class: "tick", x1: x(v), x2: x(v), y1: bottom, y2: bottom + 4 }));
      parts.push(element("text", { x: x(v), y: bottom + 17, "text-anchor": "middle" }, short(v)));
    }
    parts.push(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: bottom, y2: bottom }));
    parts.push(element("text", { x: WIDTH - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, data.x));
    parts.push(element("text", { x: 2, y: 12 }, data.y));
    return parts;
  }

  // A path with a gap at every value that is not finite, which is marked at the top.
  function curve(series) {
    let path = "",
      starts = true;
    const marks = [],
      usable = series.points.filter(isPoint);
    for (const p of series.points) {
      if (isPoint(p)) path += (starts ? "M" : "L") + x(p[0]).toFixed(1) + " " + y(p[1]).toFixed(1);
      else if (typeof p[1] === "string")
        marks.push(element("text", { class: "broken", x: x(p[0]), y: TOP + 6, "text-anchor": "middle" }, "✕"));
      starts = !isPoint(p);
    }
    if (series.dots || usable.length === 1)
      marks.push(
        ...usable.map((p) => element("circle", { class: `dot s${series.colour}`, cx: x(p[0]), cy: y(p[1]), r: 2.5 })),
      );
    return [element("path", { class: `line s${series.colour}${series.raw ? " raw" : ""}`, d: path }), ...marks];
  }

  // Shows the values of all curves at their points nearest to a horizontal position.
  function point(pixel) {
    cursor.replaceChildren(element("line", { class: "cursor", x1: pixel, x2: pixel, y1: TOP, y2: HEIGHT - BOTTOM }));
    const rows = [];
    for (const s of data.series) {
      let nearest = null;
      for (const p of s.points) {
        const isShown = typeof p[1] === "string" || isPoint(p);
        if (isShown && (!nearest || Math.abs(x(p[0]) - pixel) < Math.abs(x(nearest[0]) - pixel))) nearest = p;
      }
      if (!nearest) continue;
      if (isPoint(nearest))
        cursor.append(element("circle", { class: `dot s${s.colour}`, cx: x(nearest[0]), cy: y(nearest[1]), r: 4 }));
      rows.push([s, nearest]);
    }
    const number = (v) =>
      typeof v === "string" ? v : Number(v.toPrecision(5)).toLocaleString("en", { maximumSignificantDigits: 5 });
    output.className = pixel < WIDTH / 2 ? "right" : ""; // beside the cursor, not over it
    output.replaceChildren(
      ...rows.map(([s, p]) => {
        const row = document.createElement("span");
        row.className = `s${s.colour}`;
        row.textContent = `${data.x} ${p[0].toLocaleString("en")}: ${s.name} ${number(p[1])}`;
        return row;
      }),
    );
  }

  const inPlot = (event) => {
    const box = svg.getBoundingClientRect();
    return Math.min(WIDTH - RIGHT, Math.max(LEFT, ((event.clientX - box.left) / box.width) * WIDTH));
  };
  function leave() {
    cursor.replaceChildren();
    output.replaceChildren();
  }
  function zoom(range) {
    view.zoom = range;
    leave();
    draw();
  }

  let start = null,
    at = 0; // where dragging began, and the number of the point under the keyboard's cursor
  svg.addEventListener("pointerdown", (event) => {
    start = inPlot(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    const now = inPlot(event);
    point(now);
    if (start !== null)
      cursor.append(
        element("rect", {
          class: "selection",
          x: Math.min(start, now),
          width: Math.abs(now - start),
          y: TOP,
          height: HEIGHT - BOTTOM - TOP,
        }),
      );
  });
  svg.addEventListener("pointerup", (event) => {
    const ends = [start, inPlot(event)].sort((a, b) => a - b);
    if (start !== null && ends[1] - ends[0] > 8) zoom(ends.map((pixel) => x.invert(pixel)));
    start = null;
  });
  svg.addEventListener("pointercancel", () => {
    start = null;
    leave();
  });
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("dblclick", () => zoom(null));
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") zoom(null);
    else if (move) {
      const longest = data.series.reduce((a, b) => (b.points.length > a.points.length ? b : a)).points.filter(isPoint);
      at = Math.min(longest.length - 1, Math.max(0, at + move * (event.shiftKey ? 20 : 1)));
      point(x(longest[at][0]));
      event.preventDefault();
    }
  });
  const buttons = Object.fromEntries([...figure.querySelectorAll("button")].map((b) => [b.name, b]));
  buttons.all.onclick = () => zoom(null);
  for (const name of ["logX", "logY"])
    buttons[name].onclick = () => {
      view[name] = !view[name];
      leave();
      draw();
    };
  svg.tabIndex = 0;
  draw();
}

function drawCharts(root) {
  root.querySelectorAll("figure[data-chart]").forEach(drawChart);
}
