"use strict";
// Draws the charts with uPlot from the data in the page. Text is set as text nodes, never as markup.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const several = page.runs.length > 1;
  const state = { x: "step", zoom: null, log: new Set() };
  const plots = new Map();
  const style = getComputedStyle(document.documentElement);
  const css = (name) => style.getPropertyValue(name).trim();
  const RUN_COLOURS = 10;
  const MOST_RAW_LOSSES = 3;
  const MOST_POINTS = 80;

  const digits = (value, most) => Number(value.toPrecision(most)).toString();

  function large(value) {
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    const found = units.find(([size]) => Math.abs(value) >= size);
    return found ? digits(value / found[0], 4) + found[1] : digits(value, 4);
  }

  function duration(seconds) {
    const units = [[172800, 86400, " d"], [7200, 3600, " h"], [120, 60, " min"]];
    const found = units.find(([least]) => Math.abs(seconds) >= least);
    return found ? digits(seconds / found[1], 3) + found[2] : digits(seconds, 3) + " s";
  }

  const FORMATS = {
    plain: (value) => (Math.abs(value) >= 1e5 ? large(value) : digits(value, 5)),
    small: (value) => (value === 0 ? "0" : Math.abs(value) < 1e-2 ? value.toExponential(2).replace(/\.?0+e/, "e") : digits(value, 3)),
    percent: (value) => digits(100 * value, 3) + " %",
    seconds: duration,
    bytes: (value) => (value >= 2 ** 30 ? digits(value / 2 ** 30, 3) + " GiB" : digits(value / 2 ** 20, 3) + " MiB"),
  };
  const X_FORMATS = { step: large, tokens: large, time: duration };
  const decimal = (low, high) => Array.from({ length: high - low }, (_, at) => [1, 2, 2.5, 5].map((each) => each * 10 ** (low + at))).flat();
  const WHOLE = decimal(0, 16).filter(Number.isInteger);
  const INCREMENTS = {
    step: WHOLE,
    tokens: WHOLE,
    time: [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, ...WHOLE.map((days) => 86400 * days)],
    bytes: (plot, axis, low, high) => decimal(-3, 6).map((each) => each * 2 ** (high >= 2 ** 30 ? 30 : 20)),
    plain: decimal(-16, 16),
  };

  // The series of a chart, from all runs, and their data on one x axis.
  function seriesOf(chart) {
    const series = [];
    const tables = [];
    const steps = new Map();
    page.runs.slice(0, chart.stacked ? 1 : undefined).forEach((run, place) => {
      for (const spec of chart.series) {
        if (spec.faint && page.runs.length > MOST_RAW_LOSSES) continue;
        const rows = spec.columns[0] in run.rows ? run.rows : run.evaluations;
        const xs = rows[state.x];
        const kept = xs.map((_, at) => at).filter((at) => xs[at] !== null);
        const log = state.log.has(chart.id);
        const values = kept.map((at) => spec.columns.reduce((sum, name) => {
          const value = rows[name][at];
          return sum === null || value === null || (log && value <= 0) ? null : sum + value;
        }, 0));
        if (values.every((value) => value === null)) continue;
        if (!several) kept.forEach((at) => steps.set(xs[at], rows.step[at]));
        tables.push([kept.map((at) => xs[at]), values]);
        const name = several ? run.id + (chart.series.length > 1 ? ", " + spec.label : "") : spec.label;
        const colour = spec.colour && (chart.stacked || !several) ? spec.colour : "--c" + (place % RUN_COLOURS);
        series.push({ spec, name, colour, count: values.length, isRepeated: place >= RUN_COLOURS });
      }
    });
    return { series, steps, data: tables.length ? uPlot.join(tables) : [] };
  }

  function wholeRange() {
    const xs = page.runs.flatMap((run) => [...run.rows[state.x], ...run.evaluations[state.x]]).filter((value) => value !== null);
    const [low, high] = xs.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
    return high > low ? [low, high] : Number.isFinite(low) ? [low - 1, low + 1] : [0, 1];
  }

  function yRange(chart) {
    return (plot, low, high) => {
      if (low === null) return [0, 1];
      if (chart.fromZero) low = Math.min(0, low);
      if (high - low < 1e-12) return [low - Math.max(Math.abs(low) * 0.05, 1e-9), high + Math.max(Math.abs(high) * 0.05, 1e-9)];
      const margin = (high - low) * 0.06;
      return [chart.fromZero ? low : low - margin, high + margin];
    };
  }

  function logRange(plot, low, high) {
    if (low === null) return [1, 10];
    const margin = Math.max((high / low) ** 0.06, 1.02);
    return [low / margin, high * margin];
  }

  // Ticks of a logarithmic axis: the densest of 1 to 9, 1-2-5 and 1; in a narrow range, even steps.
  function logSplits(plot, axis, low, high) {
    const powers = Array.from({ length: Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1 }, (_, at) => Math.floor(Math.log10(low)) + at);
    const ticks = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 5], [1]].map((each) => powers.flatMap((power) => each.map((digit) => digit * 10 ** power)).filter((tick) => tick >= low && tick <= high));
    const found = ticks.find((each) => each.length <= 9) || ticks[2];
    if (found.length > 2) return found;
    const step = INCREMENTS.plain.find((each) => (high - low) / each <= 6);
    return Array.from({ length: 8 }, (_, at) => (Math.ceil(low / step) + at) * step).filter((tick) => tick <= high);
  }

  const lastIndex = (values) => values.findLastIndex((value) => value !== null && value !== undefined);

  function uplotSeries(chart, { spec, name, colour, count, isRepeated }, format) {
    const isFilled = Boolean(chart.stacked);
    return {
      label: name,
      class: spec.faint ? "faint" : "full",
      stroke: () => css(colour),
      fill: isFilled ? () => css(colour) : undefined,
      width: isFilled ? 0 : spec.faint ? 1 : spec.points || several ? 1.4 : 1.8,
      alpha: spec.faint ? 0.35 : several ? 0.85 : 1,
      dash: spec.points ? [5, 4] : isRepeated ? [9, 3] : undefined,
      points: { show: spec.points ? count <= MOST_POINTS : count === 1, size: several ? 5 : 7, fill: () => css(colour), stroke: () => css("--bg"), width: 1.4 },
      value: (plot, _, order, index) => {
        // Without a cursor, the last value; -1 where the cursor is too far from the series.
        const at = index ?? (plot.cursor.left >= 0 ? -1 : lastIndex(plot.data[order]));
        const value = plot.data[order][at];
        if (value === null || value === undefined) return "–";
        // In a stack, each series has the sum of those below it.
        const own = isFilled && order + 1 < plot.data.length ? Math.max(0, value - plot.data[order + 1][at]) : value;
        const isElsewhere = spec.points && index !== null && at !== plot.cursor.idx;
        return format(own) + (isElsewhere ? ` (at ${X_FORMATS[state.x](plot.data[0][at])})` : "");
      },
    };
  }

  const AXIS = { stroke: () => css("--soft"), font: "11.5px system-ui, sans-serif", ticks: { show: false }, grid: { show: false }, gap: 6 };
  const formatted = (format) => (plot, splits) => splits.map(format);

  function axes(chart, format) {
    const splits = state.log.has(chart.id) ? { splits: logSplits, filter: (plot, found) => found } : {};
    return [
      { ...AXIS, size: 26, space: 80, incrs: INCREMENTS[state.x], values: formatted(X_FORMATS[state.x]) },
      { ...AXIS, size: 62, space: 34, incrs: INCREMENTS[chart.format] || INCREMENTS.plain, grid: { stroke: () => css("--line"), width: 1 }, values: formatted(format), ...splits },
    ];
  }

  // Vertical lines where the run was started again; a tooltip has the reason.
  function addMarks(plot) {
    for (const mark of page.runs.flatMap((run) => run.marks)) {
      const at = mark[state.x];
      if (at === null) continue;
      const line = document.createElement("div");
      line.className = "mark";
      line.title = mark.text;
      line.at = at;
      plot.over.append(line);
    }
  }

  function placeMarks(plot) {
    for (const line of plot.over.querySelectorAll(".mark")) {
      const share = plot.valToPos(line.at, "x") / plot.over.clientWidth;
      line.hidden = !(share >= 0 && share <= 1);
      line.style.left = `${100 * share}%`;
    }
  }

  // The legend's labels switch series on and off: by the keyboard, too.
  function makeLegendOperable(plot) {
    for (const label of plot.root.querySelectorAll(".u-series:not(:first-child) th")) {
      label.tabIndex = 0;
      label.setAttribute("role", "button");
      label.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        label.click();
      });
    }
  }

  function describe(plot, name, [low, high]) {
    plot.ctx.canvas.setAttribute("role", "img");
    plot.ctx.canvas.setAttribute("aria-label", `${name} ${low} to ${high}`);
  }

  function drawChart(figure, chart) {
    const { series, steps, data } = seriesOf(chart);
    figure.hidden = series.length === 0;
    if (figure.hidden) return;
    const width = figure.clientWidth;
    if (!width) return;
    const isLog = state.log.has(chart.id);
    const format = FORMATS[chart.format || "plain"];
    const [min, max] = state.zoom || wholeRange();
    const xLabel = (plot, value, order, index) => {
      const at = plot.data[0][index ?? plot.data[0].length - 1];
      const step = state.x !== "step" && steps.get(at);
      return (state.x === "step" ? at.toLocaleString("en") : X_FORMATS[state.x](at)) + (step ? ` (step ${step.toLocaleString("en")})` : "");
    };
    plots.set(figure, new uPlot({
      width,
      height: chart.wide ? Math.min(340, Math.max(220, width * 0.34)) : 210,
      padding: [8, 24, 0, 0],
      scales: {
        x: { time: false, min, max },
        y: isLog ? { distr: 3, range: logRange } : { range: yRange(chart) },
      },
      axes: axes(chart, format),
      series: [{ label: state.x, value: xLabel }, ...series.map((each) => uplotSeries(chart, each, format))],
      legend: { markers: { width: 0, fill: (plot, order) => css(series[order - 1].colour) } },
      cursor: {
        y: false,
        hover: { prox: (plot, order) => (order > 0 && series[order - 1].spec.points ? null : 30) },
        sync: { key: "charts", setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        drag: { setScale: false, dist: 8 },
        // By default, a drag that begins on a mark does nothing.
        bind: { dblclick: () => () => zoom(null), mousedown: (plot, target, handle) => (event) => { if (event.button === 0) handle(event); } },
      },
      hooks: {
        ready: [addMarks, placeMarks, makeLegendOperable, (plot) => plot.setScale("x", { min, max })],
        draw: [placeMarks],
        setScale: [(plot, key) => key === "x" && describe(plot, `${chart.title}, ${state.x}`, [plot.scales.x.min, plot.scales.x.max].map(X_FORMATS[state.x]))],
        setSelect: [(plot) => {
          const { left, width: picked } = plot.select;
          if (picked < 8) return;
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          zoom([plot.posToVal(left, "x"), plot.posToVal(left + picked, "x")]);
        }],
      },
    }, data, figure));
  }

  function drawHeat(figure, heat) {
    const width = figure.clientWidth;
    if (!width) return;
    const ranks = heat.values.length;
    const cell = Math.max(3, Math.min(22, 420 / ranks));
    const edges = heat.first.map((step) => step - 0.5);
    const paint = (plot) => {
      const { ctx } = plot;
      const bottom = (rank) => plot.valToPos(rank, "y", true);
      heat.values.forEach((row, rank) => row.forEach((share, column) => {
        const left = plot.valToPos(edges[column], "x", true);
        ctx.fillStyle = `rgba(${css("--heat")}, ${0.05 + 0.95 * share ** 0.7})`;
        ctx.fillRect(left, bottom(rank), plot.valToPos(heat.last[column] + 0.5, "x", true) - left, bottom(rank + 1) - bottom(rank));
      }));
    };
    const waited = (plot, value, order, column) => {
      const rank = Math.floor(plot.posToVal(plot.cursor.top, "y"));
      const share = column === null ? undefined : heat.values[rank]?.[column];
      if (share === undefined) return "–";
      const [first, last] = [heat.first[column], heat.last[column]];
      return `rank ${rank}, ${first === last ? "step " + first : "steps " + first + " to " + last}, ${FORMATS.percent(share)} of the time`;
    };
    const every = Math.max(1, Math.ceil(14 / cell));
    plots.set(figure, new uPlot({
      width,
      height: cell * ranks + 34,
      padding: [8, 24, 0, 0],
      scales: { x: { time: false, range: [edges[0], heat.last.at(-1) + 0.5] }, y: { range: [0, ranks], dir: -1 } },
      axes: [
        { ...AXIS, size: 26, space: 80, incrs: WHOLE, values: formatted(large) },
        { ...AXIS, size: 62, splits: () => heat.values.map((_, rank) => rank + 0.5).filter((_, rank) => rank % every === 0), values: formatted((at) => "rank " + Math.floor(at)) },
      ],
      series: [{ label: "step", value: () => "" }, { label: "waited", value: waited, paths: () => null, points: { show: false } }],
      legend: { markers: { show: false } },
      cursor: { drag: { x: false }, points: { show: false } },
      hooks: {
        draw: [paint],
        // The legend's value depends on the rank under the cursor as well as on the step.
        setCursor: [(plot) => plot.setLegend({ idx: plot.cursor.idx }, false)],
        ready: [(plot) => describe(plot, "Waiting by rank, step", [heat.first[0], heat.last.at(-1)])],
      },
    }, [edges, heat.values[0]], figure));
  }

  function draw(figure) {
    plots.get(figure)?.destroy();
    plots.delete(figure);
    const { chart, heat } = figure.dataset;
    if (chart) drawChart(figure, page.charts.find((each) => each.id === chart));
    else drawHeat(figure, page.heat.find((each) => each.run === heat));
  }

  const figures = [...document.querySelectorAll("[data-chart], [data-heat]")];
  const drawAll = () => figures.forEach(draw);
  const reset = document.querySelector("[data-reset]");

  function zoom(range) {
    state.zoom = range;
    reset.hidden = range === null;
    const [min, max] = range || wholeRange();
    for (const [figure, plot] of plots) if (figure.dataset.chart) plot.setScale("x", { min, max });
  }

  const choices = document.querySelectorAll("[data-x]");
  for (const button of choices) {
    button.addEventListener("click", () => {
      state.x = button.dataset.x;
      state.zoom = null;
      reset.hidden = true;
      for (const each of choices) each.setAttribute("aria-pressed", String(each === button));
      drawAll();
    });
  }
  for (const button of document.querySelectorAll("[data-log]")) {
    button.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      if (isLog) state.log.add(button.dataset.log); else state.log.delete(button.dataset.log);
      draw(button.closest("figure"));
    });
  }
  reset?.addEventListener("click", () => zoom(null));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  // An element in a closed box has no width until the box is opened.
  const widths = new Map();
  const observer = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      if (widths.get(target) === target.clientWidth) continue;
      widths.set(target, target.clientWidth);
      draw(target);
    }
  });
  figures.forEach((figure) => observer.observe(figure));
  const setPrinting = (isPrinting) => {
    document.documentElement.classList.toggle("printing", isPrinting);
    if (isPrinting) for (const details of document.querySelectorAll("details")) details.open = true;
    drawAll();
  };
  window.addEventListener("beforeprint", () => setPrinting(true));
  window.addEventListener("afterprint", () => setPrinting(false));
})();
