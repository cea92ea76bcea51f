"use strict";
// Draws the curves from the page's own data. Text goes in as text nodes alone, never as markup.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];
  const STACKED = ["--data", "--wait", "--compute"];
  const MARGIN = { left: 58, right: 14, top: 8, bottom: 24 };
  const state = { x: "step", zoom: null, log: new Set() };
  const several = page.runs.length > 1;

  function svgElement(name, attributes, parent) {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (parent) parent.append(made);
    return made;
  }

  function element(name, className, text, parent) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  const digits = (value, most) => Number(value.toPrecision(most)).toString();

  function large(value) {
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    for (const [size, unit] of units) {
      if (Math.abs(value) >= size) return digits(value / size, 4) + unit;
    }
    return digits(value, 4);
  }

  function clock(seconds) {
    const whole = Math.abs(seconds);
    if (whole >= 172800) return digits(seconds / 86400, 3) + " d";
    if (whole >= 7200) return digits(seconds / 3600, 3) + " h";
    if (whole >= 120) return digits(seconds / 60, 3) + " min";
    return digits(seconds, 3) + " s";
  }

  const FORMATS = {
    plain: (value) => (Math.abs(value) >= 1e5 ? large(value) : digits(value, 5)),
    small: (value) => (value === 0 ? "0" : Math.abs(value) < 1e-2 ? value.toExponential(2).replace(/\.?0+e/, "e") : digits(value, 3)),
    percent: (value) => digits(100 * value, 3) + " %",
    seconds: clock,
    bytes: (value) => (value >= 2 ** 30 ? digits(value / 2 ** 30, 3) + " GiB" : digits(value / 2 ** 20, 3) + " MiB"),
  };
  const X_FORMATS = { step: large, tokens: large, time: clock };

  function linearTicks(low, high, most, unit) {
    const size = unit || 1;
    const rough = (high - low) / size / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999) * size;
    const ticks = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
      ticks.push(Math.abs(at) < step * 1e-6 ? 0 : at);
    }
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
      for (const each of [1, 2, 5]) {
        const value = Math.log10(each * 10 ** power);
        if (value >= low - 1e-9 && value <= high + 1e-9) ticks.push(value);
      }
    }
    const wide = ticks.length > 9 ? ticks.filter((each) => Math.abs(each - Math.round(each)) < 1e-6) : ticks;
    return wide.length > 1 ? wide : linearTicks(low, high, 4);
  }

  // A chart's series, each with its own x: those of all runs, one after the other.
  function seriesOf(chart) {
    const found = [];
    page.runs.forEach((run, place) => {
      const specs = chart.stack || chart.series;
      const before = [];
      specs.forEach((spec, order) => {
        const evaluations = spec.column === "val_loss";
        const source = evaluations ? run.evaluations : run.rows;
        let values;
        if (spec.rest) {
          values = source[spec.rest].map((whole, at) => Math.max(whole, before.length ? before[before.length - 1][at] : 0));
        } else {
          values = source[spec.column];
        }
        if (!values || !values.some((value) => value !== null)) return;
        let base = null;
        if (chart.stack) {
          base = before.length ? before[before.length - 1] : values.map(() => 0);
          if (!spec.rest) values = values.map((value, at) => value + base[at]);
          before.push(values);
        }
        const colour = chart.stack ? STACKED[order] : several ? COLOURS[place % 6] : COLOURS[spec.points ? 1 : 0];
        found.push({ ...spec, run, place, x: source[state.x], steps: source.step, values, base, colour,
          name: several ? run.id + (specs.length > 1 ? ", " + spec.label : "") : spec.label });
      });
    });
    return chart.stack && several ? found.filter((each) => each.place === 0) : found;
  }

  function xDomain() {
    let [low, high] = [Infinity, -Infinity];
    for (const run of page.runs) {
      for (const value of [...(run.rows[state.x] || []), ...(run.evaluations[state.x] || [])]) {
        if (value === null) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (!(high > low)) [low, high] = [Number.isFinite(low) ? low - 1 : 0, Number.isFinite(high) ? high + 1 : 1];
    return state.zoom || [low, high];
  }

  function yDomain(chart, series, x, log) {
    let [low, high] = [Infinity, -Infinity];
    for (const each of series) {
      each.values.forEach((value, at) => {
        const place = each.x[at];
        if (value === null || place === null || place < x[0] || place > x[1] || (log && value <= 0)) return;
        const shown = log ? Math.log10(value) : value;
        low = Math.min(low, shown);
        high = Math.max(high, shown);
      });
    }
    if (!Number.isFinite(low)) return log ? [0, 1] : [0, 1];
    if (chart.fromZero && !log) low = Math.min(0, low);
    if (high - low < 1e-12) [low, high] = [low - Math.max(Math.abs(low) * 0.05, 1e-9), high + Math.max(Math.abs(high) * 0.05, 1e-9)];
    const room = (high - low) * 0.06;
    return [chart.fromZero && !log ? low : low - room, high + room];
  }

  function drawChart(figure, chart) {
    const log = state.log.has(chart.id);
    const series = seriesOf(chart);
    figure.hidden = series.length === 0;
    if (figure.hidden) return;
    figure.replaceChildren();
    drawCaption(figure, chart, series, log);
    const width = Math.max(260, figure.clientWidth);
    const height = chart.wide ? Math.min(340, Math.max(220, width * 0.34)) : 210;
    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title }, figure);
    const x = xDomain();
    const y = yDomain(chart, series, x, log);
    const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
    const toX = (value) => inner.left + ((value - x[0]) / (x[1] - x[0])) * (inner.right - inner.left);
    const toY = (value) => {
      const shown = log ? Math.log10(value) : value;
      return inner.bottom - ((shown - y[0]) / (y[1] - y[0])) * (inner.bottom - inner.top);
    };
    const format = FORMATS[chart.format || "plain"];
    drawAxes(svg, { x, y, inner, toX, log, format, unit: chart.format === "bytes" ? 2 ** (y[1] >= 2 ** 30 ? 30 : 20) : 1 });
    const clip = "clip-" + chart.id;
    const defs = svgElement("defs", {}, svg);
    const clipPath = svgElement("clipPath", { id: clip }, defs);
    svgElement("rect", { x: inner.left, y: inner.top - 4, width: inner.right - inner.left, height: inner.bottom - inner.top + 8 }, clipPath);
    const plot = svgElement("g", { "clip-path": `url(#${clip})` }, svg);
    for (const run of page.runs) {
      for (const mark of run.marks) {
        const at = mark[state.x];
        if (at === null || at < x[0] || at > x[1]) continue;
        const line = svgElement("line", { class: "mark", x1: toX(at), x2: toX(at), y1: inner.top, y2: inner.bottom }, plot);
        svgElement("title", {}, line).textContent = mark.text;
      }
    }
    for (const each of series) drawSeries(plot, each, toX, toY, log, chart);
    listen(figure, svg, { chart, series, inner, x, toX, toY, format, height, width });
  }

  function drawCaption(figure, chart, series, log) {
    const caption = element("figcaption", "", undefined, figure);
    element("span", "", chart.title, caption);
    const keys = element("span", "keys", undefined, caption);
    const shown = series.filter((each) => !each.faint);
    if (series.length > 1) {
      for (const each of shown) {
        const key = element("span", "", undefined, keys);
        const dot = element("i", "", undefined, key);
        dot.style.background = `var(${each.colour})`;
        key.append(each.name);
      }
    }
    if (chart.canLog) {
      const button = element("button", "", "log", caption);
      button.setAttribute("aria-pressed", String(log));
      button.addEventListener("click", () => {
        if (log) state.log.delete(chart.id); else state.log.add(chart.id);
        drawChart(figure, chart);
      });
    }
  }

  function drawAxes(svg, { x, y, inner, toX, log, format, unit }) {
    const most = Math.max(2, Math.floor((inner.bottom - inner.top) / 38));
    for (const tick of log ? logTicks(y[0], y[1]) : linearTicks(y[0], y[1], most, unit)) {
      const at = inner.bottom - ((tick - y[0]) / (y[1] - y[0])) * (inner.bottom - inner.top);
      svgElement("line", { class: "grid", x1: inner.left, x2: inner.right, y1: at, y2: at }, svg);
      svgElement("text", { x: inner.left - 8, y: at + 4, "text-anchor": "end" }, svg).textContent = format(log ? 10 ** tick : tick);
    }
    const columns = Math.max(2, Math.floor((inner.right - inner.left) / 90));
    const size = state.x !== "time" ? 1 : x[1] - x[0] >= 7200 ? 3600 : x[1] - x[0] >= 120 ? 60 : 1;
    for (const tick of linearTicks(x[0], x[1], columns, size)) {
      if (state.x !== "time" && tick !== Math.round(tick)) continue;
      svgElement("text", { x: toX(tick), y: inner.bottom + 17, "text-anchor": "middle" }, svg).textContent = X_FORMATS[state.x](tick);
    }
  }

  function drawSeries(plot, each, toX, toY, log, chart) {
    const colour = `var(${each.colour})`;
    const points = [];
    let path = "";
    let drawing = false;
    each.values.forEach((value, at) => {
      const place = each.x[at];
      if (value === null || place === null || (log && value <= 0)) { drawing = false; return; }
      const [px, py] = [toX(place), toY(value)];
      path += `${drawing ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`;
      drawing = true;
      points.push([px, py]);
    });
    if (chart.stack) {
      const back = each.base.map((value, at) => [toX(each.x[at]), toY(value)]).reverse();
      const edge = back.map(([px, py]) => `L${px.toFixed(1)} ${py.toFixed(1)}`).join("");
      svgElement("path", { d: `${path}${edge}Z`, fill: colour, "fill-opacity": 0.85 }, plot);
      return;
    }
    const classes = each.faint ? "line faint" : each.points ? "line sparse" : "line";
    svgElement("path", { class: classes, d: path, stroke: colour }, plot);
    if (each.points && points.length <= 80) {
      for (const [px, py] of points) svgElement("circle", { cx: px.toFixed(1), cy: py.toFixed(1), r: 3.4, fill: colour, stroke: "var(--bg)", "stroke-width": 1.4 }, plot);
    } else if (points.length === 1) {
      svgElement("circle", { cx: points[0][0], cy: points[0][1], r: 3, fill: colour }, plot);
    }
  }

  function nearest(xs, target) {
    let best = -1;
    xs.forEach((value, at) => {
      if (value !== null && (best < 0 || Math.abs(value - target) < Math.abs(xs[best] - target))) best = at;
    });
    return best;
  }

  function listen(figure, svg, view) {
    const { inner, x } = view;
    const tip = element("div", "tip", undefined, figure);
    const cursor = svgElement("line", { class: "cursor", y1: inner.top, y2: inner.bottom, visibility: "hidden" }, svg);
    const pick = svgElement("rect", { class: "pick", y: inner.top, height: inner.bottom - inner.top, visibility: "hidden" }, svg);
    let began = null;
    const place = (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * view.width;
      return Math.min(inner.right, Math.max(inner.left, at));
    };
    const valueAt = (at) => x[0] + ((at - inner.left) / (inner.right - inner.left)) * (x[1] - x[0]);
    svg.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "touch" || event.button !== 0) return;
      began = place(event);
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      const at = place(event);
      if (began !== null) {
        pick.setAttribute("x", Math.min(began, at));
        pick.setAttribute("width", Math.abs(at - began));
        pick.setAttribute("visibility", "visible");
      }
      showTip(tip, cursor, view, at, valueAt(at));
    });
    svg.addEventListener("pointerup", (event) => {
      const from = began;
      began = null;
      if (from === null) return;
      const at = place(event);
      if (Math.abs(at - from) > 8) zoom([valueAt(Math.min(from, at)), valueAt(Math.max(from, at))]);
    });
    svg.addEventListener("dblclick", () => zoom(null));
    svg.addEventListener("pointerleave", () => {
      tip.style.display = "none";
      cursor.setAttribute("visibility", "hidden");
    });
  }

  function showTip(tip, cursor, view, at, value) {
    tip.replaceChildren();
    let head = null;
    for (const each of view.series) {
      const found = nearest(each.x, value);
      if (found < 0) continue;
      if (head === null) {
        head = view.toX(each.x[found]);
        const words = state.x === "step" ? "step " + each.x[found].toLocaleString("en") : `${X_FORMATS[state.x](each.x[found])} (step ${each.steps[found].toLocaleString("en")})`;
        element("b", "", words, tip);
      }
      const own = each.base ? each.values[found] - each.base[found] : each.values[found];
      if (own === null) continue;
      tip.append("\n");
      const dot = element("i", "", undefined, tip);
      dot.style.background = `var(${each.colour})`;
      const late = each.points ? ` (step ${each.steps[found].toLocaleString("en")})` : "";
      tip.append(`${each.name} ${view.format(own)}${late}`);
    }
    if (head === null) return;
    cursor.setAttribute("x1", head);
    cursor.setAttribute("x2", head);
    cursor.setAttribute("visibility", "visible");
    tip.style.display = "block";
    placeTip(tip, at / view.width);
  }

  function placeTip(tip, share) {
    tip.style.top = "34px";
    tip.style.left = share < 0.5 ? `calc(${(100 * share).toFixed(1)}% + 14px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${(100 - 100 * share).toFixed(1)}% + 14px)`;
  }

  function drawHeat(figure, heat) {
    figure.replaceChildren();
    const caption = element("figcaption", "", undefined, figure);
    element("span", "", "How long each rank waited for the others", caption);
    element("span", "keys", "share of a step: pale none, deep all; a rank that never waits holds the others up", caption);
    const ranks = heat.values.length;
    const columns = heat.first.length;
    const width = Math.max(260, figure.clientWidth);
    const cell = Math.max(3, Math.min(22, 420 / ranks));
    const inner = { left: MARGIN.left, right: width - MARGIN.right, top: 4, bottom: 4 + cell * ranks };
    const height = inner.bottom + MARGIN.bottom;
    const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "waiting by rank and step" }, figure);
    const wide = (inner.right - inner.left) / columns;
    heat.values.forEach((row, rank) => {
      row.forEach((share, column) => {
        svgElement("rect", {
          x: (inner.left + column * wide).toFixed(2), y: (inner.top + rank * cell).toFixed(2),
          width: (wide + (columns > 60 ? 0.4 : -1)).toFixed(2), height: (cell - (cell > 6 ? 1 : 0)).toFixed(2),
          fill: `rgba(var(--heat), ${(0.05 + 0.95 * share ** 0.7).toFixed(3)})`,
        }, svg);
      });
    });
    const every = Math.max(1, Math.ceil(14 / cell));
    for (let rank = 0; rank < ranks; rank += every) {
      svgElement("text", { x: inner.left - 8, y: inner.top + rank * cell + cell / 2 + 4, "text-anchor": "end" }, svg).textContent = ranks > 12 ? rank : "rank " + rank;
    }
    const labels = Math.min(columns, Math.max(2, Math.floor((inner.right - inner.left) / 110)));
    for (let label = 0; label < labels; label += 1) {
      const column = Math.round((label * (columns - 1)) / Math.max(1, labels - 1));
      svgElement("text", { x: inner.left + (column + 0.5) * wide, y: inner.bottom + 16, "text-anchor": "middle" }, svg).textContent = large(heat.last[column]);
    }
    const tip = element("div", "tip", undefined, figure);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * width;
      const column = Math.floor((at - inner.left) / wide);
      const rank = Math.floor((((event.clientY - box.top) / box.height) * height - inner.top) / cell);
      const share = heat.values[rank] && heat.values[rank][column];
      tip.style.display = share === undefined ? "none" : "block";
      if (share === undefined) return;
      const [first, last] = [heat.first[column], heat.last[column]];
      tip.textContent = `rank ${rank}, ${first === last ? "step " + first : "steps " + first + " to " + last}\nwaited ${FORMATS.percent(share)} of the time`;
      placeTip(tip, at / width);
    });
    svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  }

  function drawTimeline(figure, timeline) {
    figure.hidden = !timeline || !(timeline.length > 0);
    if (figure.hidden) return;
    figure.replaceChildren();
    const caption = element("figcaption", "", undefined, figure);
    element("span", "", "Timeline", caption);
    const keys = element("span", "keys", undefined, caption);
    const shown = [["--compute", "training"], ["--c1", "evaluation"]];
    if (timeline.events.some((each) => each.kind === "failure" || each.kind === "failed")) shown.push(["--bad", "failure"]);
    if (timeline.events.some((each) => each.kind === "restart" || each.kind === "resume")) shown.push(["--good", "start again"]);
    for (const [colour, name] of shown) {
      const key = element("span", "", undefined, keys);
      element("i", "", undefined, key).style.background = `var(${colour})`;
      key.append(name);
    }
    const width = Math.max(260, figure.clientWidth);
    const inner = { left: 6, right: width - 6 };
    const svg = svgElement("svg", { viewBox: `0 0 ${width} 62`, role: "img", "aria-label": "timeline" }, figure);
    const toX = (seconds) => inner.left + (seconds / timeline.length) * (inner.right - inner.left);
    svgElement("rect", { x: inner.left, y: 12, width: inner.right - inner.left, height: 20, rx: 5, fill: "var(--panel)" }, svg);
    for (const [from, to] of timeline.spans) {
      svgElement("rect", { x: toX(from).toFixed(1), y: 12, width: Math.max(1, toX(to) - toX(from)).toFixed(1), height: 20, fill: "var(--compute)", rx: 2 }, svg);
    }
    for (const at of timeline.evaluations) svgElement("rect", { x: (toX(at) - 1).toFixed(1), y: 10, width: 2, height: 24, fill: "var(--c1)" }, svg);
    for (const each of timeline.events) {
      const colour = { failure: "--bad", failed: "--bad", restart: "--good", resume: "--good", finished: "--good", stopped: "--mid" }[each.kind] || "--soft";
      const mark = svgElement("path", { d: `M${toX(each.time).toFixed(1)} 10l-5 -8h10z`, fill: `var(${colour})` }, svg);
      svgElement("title", {}, mark).textContent = `${each.kind} after ${clock(each.time)} ${each.text}`;
    }
    const columns = Math.max(2, Math.floor(width / 120));
    const unit = timeline.length >= 7200 ? 3600 : timeline.length >= 120 ? 60 : 1;
    for (const tick of linearTicks(0, timeline.length, columns, unit)) {
      const anchor = tick === 0 ? "start" : toX(tick) > inner.right - 20 ? "end" : "middle";
      svgElement("text", { x: toX(tick), y: 52, "text-anchor": anchor }, svg).textContent = clock(tick);
    }
  }

  function zoom(range) {
    state.zoom = range;
    document.querySelector("[data-reset]").hidden = range === null;
    drawCurves();
  }

  function drawCurves() {
    for (const figure of document.querySelectorAll("[data-chart]")) {
      drawChart(figure, page.charts.find((each) => each.id === figure.dataset.chart));
    }
  }

  function draw() {
    drawCurves();
    for (const figure of document.querySelectorAll("[data-heat]")) {
      drawHeat(figure, page.heat.find((each) => each.run === figure.dataset.heat));
    }
    for (const figure of document.querySelectorAll("[data-timeline]")) {
      drawTimeline(figure, page.runs.find((each) => each.id === figure.dataset.timeline).timeline);
    }
  }

  const choices = document.querySelectorAll("[data-x]");
  for (const button of choices) {
    button.addEventListener("click", () => {
      state.x = button.dataset.x;
      for (const each of choices) each.setAttribute("aria-pressed", String(each === button));
      zoom(null);
    });
  }
  const reset = document.querySelector("[data-reset]");
  if (reset) reset.addEventListener("click", () => zoom(null));
  for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", draw);
  window.addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
    draw();
  });
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    requestAnimationFrame(draw);
  }).observe(document.body);
  width = document.body.clientWidth;
  draw();
})();
