// Curves. uPlot draws lines; its range and ticks are ours, because its own take seconds where all values lie within 1e-7
// of each other. The logarithm is taken of the data, for the same reason. Values that are not finite are marks, places
// without a value are gaps. The charts of a view share one cursor and one zoom.
"use strict";
(function (page) {
  const FLAT = 1e-6; // a spread this small beside the values is drawn as a level line, and said
  const LARGEST = 1e300;
  const AXIS = { width: 54, height: 24 };
  const SMOOTHED = [0, 9, 51]; // points in a running mean
  const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];
  const MAX_MARKS = 100;

  page.color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  /** Ticks at round numbers: at most about `count`, whatever the range. */
  page.ticks = function (low, high, count) {
    const rough = (high - low) / Math.max(count, 1);
    if (!(rough > 0) || !Number.isFinite(rough)) return [];
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
    const found = [];
    for (let index = Math.ceil(low / step); index * step <= high && found.length < 4 * count + 4; index++) found.push(index * step);
    return found;
  };

  /** The range to draw; level lines get one that their ticks can tell apart. */
  function rangeOf(low, high, isLog) {
    if (!page.isNumber(low) || !page.isNumber(high)) return [0, 1];
    if (isLog && high - low <= FLAT) return [low - 0.05, high + 0.05];
    const size = Math.max(Math.abs(low), Math.abs(high));
    const margin = high - low <= size * FLAT ? (size ? size * 0.1 : 1) : (high - low) * 0.06;
    return [low - margin, high + margin];
  }

  /** Numbers on an axis, all written alike, with as many digits as the distance between them needs. */
  function tickTexts(ticks) {
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : Math.abs(ticks[0]) || 1;
    const most = Math.max(...ticks.map(Math.abs));
    const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return ticks.map((value) => {
      const size = Math.abs(value);
      const sign = value < 0 ? "\u2212" : "";
      if (size < step / 2) return "0";
      if (most < 1e5 && decimals <= 4) return sign + size.toFixed(decimals);
      const digits = Math.floor(Math.log10(size) + 1e-9) - Math.floor(Math.log10(step) + 1e-9);
      return sign + size.toExponential(Math.min(6, Math.max(0, digits))).replace("e+", "e");
    });
  }

  /** A positive number on a logarithmic axis. */
  const shortly = (value) => (value >= 1e5 || value < 1e-3 ? value.toExponential(0).replace("e+", "e") : page.number(value, 3));

  /** What charts tell each other: where the cursor is, not what is dragged. */
  const isMove = (kind) => kind !== "mousedown" && kind !== "mouseup";

  function finite(value) {
    return typeof value === "number" && Math.abs(value) <= LARGEST ? value : null;
  }

  /** Mean over `count` values around each, of those that are there; gaps stay. */
  function smoothed(values, count) {
    const half = Math.floor(count / 2);
    return values.map((value, index) => (value === null ? null : page.mean(values.slice(Math.max(0, index - half), index + half + 1))));
  }

  /** What one chart shares with the others of its view. */
  page.chartGroup = function (options) {
    const group = {
      charts: new Set(),
      zoom: options.zoom || null,
      isLog: Boolean(options.isLog),
      smooth: SMOOTHED.includes(options.smooth) ? options.smooth : 0,
      lastStep: options.lastStep,
      sync: uPlot.sync(`curves ${Math.random()}`),
      seen: new IntersectionObserver(
        (entries) => {
          for (const entry of entries) if (entry.isIntersecting) entry.target.drawChart();
        },
        { rootMargin: "300px" },
      ),
      dark: matchMedia("(prefers-color-scheme: dark)"),
      setZoom(zoom) {
        group.zoom = zoom;
        group.redraw();
        options.changed(group);
      },
      redraw() {
        for (const chart of group.charts) chart.rebuild();
      },
      /** Draw what has come since; cursor, zoom and selection stay. */
      update() {
        for (const chart of group.charts) chart.update();
      },
      destroy() {
        group.seen.disconnect();
        group.dark.removeEventListener("change", group.redraw);
        for (const chart of group.charts) chart.destroy();
        group.charts.clear();
      },
      controls: null,
    };
    group.dark.addEventListener("change", group.redraw);
    group.controls = controlsOf(group, options);
    return group;
  };

  /** Log scale, smoothing, and the steps that are shown. */
  function controlsOf(group, options) {
    const change = () => {
      group.redraw();
      options.changed(group);
    };
    const log = page.node("input", {
      type: "checkbox",
      checked: group.isLog,
      "data-key": "log",
      on: {
        change: () => {
          group.isLog = log.checked;
          change();
        },
      },
    });
    const smooth = page.select(
      "Smoothing",
      SMOOTHED.map((count) => [String(count), count ? `mean of ${count} points` : "none"]),
      String(group.smooth),
      (value) => {
        group.smooth = Number(value);
        change();
      },
    );
    const ends = ["from", "to"].map((name, index) =>
      page.node("input", {
        type: "number",
        min: "0",
        "aria-label": index ? "to step" : "from step",
        class: "step",
        value: group.zoom ? String(Math.round(group.zoom[index])) : "",
        placeholder: index ? "last" : "first",
        "data-key": name,
        on: { change: () => readZoom() },
      }),
    );
    const readZoom = () => {
      const [from, to] = ends.map((end) => (end.value === "" ? null : Number(end.value)));
      if (from === null && to === null) return group.setZoom(null);
      const low = from ?? 0;
      const high = to ?? options.lastStep();
      if (high > low) show([low, high]);
    };
    const all = page.node("button", { type: "button", "data-key": "all steps", on: { click: () => group.setZoom(null) } }, "All steps");
    const setZoom = group.setZoom;
    const show = (zoom) => {
      all.disabled = zoom === null;
      setZoom(zoom);
    };
    group.setZoom = (zoom) => {
      ends.forEach((end, index) => {
        end.value = zoom ? String(Math.round(zoom[index])) : "";
      });
      show(zoom);
    };
    all.disabled = group.zoom === null;
    return page.node(
      "div",
      { class: "bar" },
      page.node("label", { class: "field" }, log, "log scale"),
      smooth,
      page.node("span", { class: "field" }, page.node("span", { class: "label" }, "Steps"), ends[0], "\u2013", ends[1], all),
    );
  }

  /** One chart: `title`, and `data()`: [{label, color index, step, mean, min, max}] of the runs in it; null while unknown.
   * `marks()`: [{step, text, href}].
   */
  page.chart = function (group, title, data, marks = () => []) {
    const value = page.node("span", { class: "chart-value" });
    const about = page.node("span", { class: "chart-about" });
    const plot = page.node("div", { class: "chart-plot" });
    const flags = page.node("div", { class: "flags" });
    const made = page.node(
      "figure",
      { class: "chart" },
      page.node("figcaption", {}, page.node("span", { class: "chart-name", title }, title), value),
      page.node("div", { class: "chart-area" }, plot, flags),
      about,
    );
    let drawn = null;
    let table = null;
    let isSeen = false;

    made.drawChart = () => {
      if (isSeen) return;
      isSeen = true;
      chart.rebuild();
    };

    const chart = {
      node: made,
      rebuild() {
        const runs = data();
        if (!isSeen || !made.isConnected || runs === null) return;
        const width = plot.clientWidth;
        if (drawn !== null) drawn.destroy();
        drawn = null;
        flags.replaceChildren();
        table = tableOf(runs, group);
        const isEmpty = !table.columns.some((column) => column.mean.some((item) => page.isNumber(item)) || column.notFinite.length);
        tell();
        if (isEmpty || width < 40) {
          page.fill(plot, isEmpty && page.node("span", { class: "muted" }, "no value"));
          return;
        }
        plot.replaceChildren();
        drawn = new uPlot(settings(width, plot.clientHeight), series(table), plot);
        placeFlags();
      },
      update() {
        const runs = data();
        if (drawn === null || runs === null) return chart.rebuild();
        const before = table;
        table = tableOf(runs, group);
        const isSame = table.columns.length === before.columns.length && table.columns.every((column, index) => column.isSparse === before.columns[index].isSparse);
        if (!isSame) return chart.rebuild();
        tell();
        drawn.setData(series(table));
      },
      destroy() {
        resized.disconnect();
        if (drawn !== null) drawn.destroy();
        drawn = null;
      },
    };

    /** What is said beside the curve. */
    function tell() {
      plot.setAttribute("role", "img");
      plot.setAttribute("aria-label", page.visible(`${title}: ${wordsOf(table)}`));
      page.fill(about, remarks(table, group));
      show(drawn === null ? null : drawn.cursor.idx);
    }

    function settings(wide, high) {
      const muted = page.color("--muted");
      const line = page.color("--line");
      return {
        width: wide,
        height: high,
        padding: [8, 18, 0, 0],
        legend: { show: false },
        cursor: {
          sync: { key: group.sync.key, setSeries: false, scales: ["x", null], filters: { pub: isMove, sub: isMove } },
          y: false,
          points: { size: 6 },
          drag: { x: true, y: false, setScale: false, dist: 4 },
          bind: { dblclick: () => () => group.setZoom(null) },
        },
        scales: {
          x: { time: false, auto: false, range: () => group.zoom || table.ends },
          y: { auto: true, range: (_, low, high) => rangeOf(low, high, group.isLog) },
        },
        axes: [
          {
            stroke: muted,
            size: AXIS.height,
            font: page.color("--axis-font"),
            grid: { show: false },
            ticks: { stroke: line, width: 1, size: 3 },
            gap: 3,
            splits: (_, __, low, high) => page.ticks(low, high, Math.max(2, wide / 80)).filter(Number.isInteger),
            values: (_, splits) => splits.map((split) => split.toLocaleString("en-US")),
          },
          {
            stroke: muted,
            size: AXIS.width,
            font: page.color("--axis-font"),
            grid: { stroke: line, width: 1 },
            ticks: { show: false },
            gap: 4,
            splits: (_, __, low, high) => splitsOf(low, high, Math.max(2, plot.clientHeight / 32)),
            values: (_, splits) => textsOf(splits),
          },
        ],
        series: [{}, ...table.columns.flatMap((column, index) => lines(column, index))],
        bands: table.columns.map((column, index) => ({
          series: [index * 3 + 2, index * 3 + 1],
          fill: page.color(`--run-${column.color}-soft`),
        })),
        hooks: {
          setSelect: [
            (u) => {
              if (u.select.width < 4) return;
              const from = u.posToVal(u.select.left, "x");
              const to = u.posToVal(u.select.left + u.select.width, "x");
              u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
              if (to > from) group.setZoom([Math.max(0, Math.floor(from)), Math.ceil(to)]);
            },
          ],
          setCursor: [(u) => show(u.cursor.idx)],
          draw: [(u) => drawNotFinite(u, table), () => placeFlags()],
        },
      };
    }

    function splitsOf(low, high, count) {
      if (!group.isLog) return page.ticks(low, high, count);
      const whole = [];
      const every = Math.max(1, Math.ceil((high - low) / count));
      for (let power = Math.ceil(low / every) * every; power <= high; power += every) whole.push(power);
      if (whole.length > 1) return whole;
      return page.ticks(10 ** low, 10 ** high, count).filter((value) => value > 0).map(Math.log10);
    }

    function textsOf(splits) {
      if (group.isLog) return splits.map((split) => shortly(10 ** split));
      return splits.length ? tickTexts(splits) : [];
    }

    function lines(column, index) {
      const stroke = page.color(`--run-${column.color}`);
      const still = { show: false };
      const hidden = { stroke: "transparent", width: 0, points: still, scale: "y" };
      return [
        { ...hidden },
        { ...hidden },
        {
          stroke,
          width: 1.5,
          dash: DASHES[index % DASHES.length],
          scale: "y",
          points: { show: column.isSparse, size: 5, fill: stroke, filter: (u, at, isShown) => (isShown ? null : alone(u.data[at])) },
        },
      ];
    }

    function show(index) {
      page.fill(value, valueText(table, index, group));
    }

    function placeFlags() {
      if (drawn === null) return;
      for (const side of ["left", "top", "width", "height"]) flags.style[side] = drawn.over.style[side];
      const [low, high] = [drawn.scales.x.min, drawn.scales.x.max];
      const inside = marks().filter((mark) => mark.step >= low && mark.step <= high);
      flags.replaceChildren();
      for (const mark of inside.slice(0, MAX_MARKS)) {
        const flag = page.node("a", { class: "flag", href: mark.href, title: mark.text, "aria-label": mark.text, tabindex: "-1" });
        flag.style.left = `${drawn.valToPos(mark.step, "x")}px`;
        flags.append(flag);
      }
    }

    const resized = new ResizeObserver(() => {
      if (drawn !== null && plot.clientWidth !== drawn.width && plot.clientWidth > 40) {
        drawn.setSize({ width: plot.clientWidth, height: plot.clientHeight });
      }
    });
    resized.observe(plot);
    group.charts.add(chart);
    group.seen.observe(made);
    return chart;
  };

  /** The runs' columns over the steps of all of them. Between two points of a run there is nothing to draw (undefined), at
   * a gap there is null.
   */
  function tableOf(runs, group) {
    const steps = [...new Set(runs.flatMap((run) => run.step))].sort((one, other) => one - other);
    const columns = runs.map((run, index) => columnOf(run, index, steps, group));
    const low = Math.min(1, ...steps.slice(0, 1));
    const high = Math.max(group.lastStep(), ...steps.slice(-1)); // the same for all charts, so that they lie below each other
    return { steps, columns, ends: high > low ? [low, high] : [low - 1, high + 1] };
  }

  function columnOf(run, index, steps, group) {
    const scaled = (values) =>
      values.map((item) => {
        const found = finite(item);
        return found === null || !group.isLog ? found : found > 0 ? Math.log10(found) : null;
      });
    const raw = run.mean.map(finite);
    const known = raw.map((item, at) => (item === null ? -1 : at)).filter((at) => at >= 0);
    const isSparse = known.length > 0 && (known.length === 1 || known.length < 0.5 * (known[known.length - 1] - known[0] + 1));
    const notFinite = run.mean
      .map((item, at) => ({ step: run.step[at], text: item }))
      .filter((item) => typeof item.text === "string" || (typeof item.text === "number" && finite(item.text) === null));
    const line = scaled(group.smooth ? smoothed(raw, group.smooth) : raw);
    const spread = (list) => aligned(run.step, scaled(list || run.mean), steps, isSparse);
    return {
      label: run.label,
      color: run.color ?? index,
      isSparse,
      notFinite,
      raw: aligned(run.step, raw, steps, true),
      mean: aligned(run.step, line, steps, isSparse),
      min: spread(run.min),
      max: spread(run.max),
      ends: known.length ? [Math.min(...known.map((at) => raw[at])), Math.max(...known.map((at) => raw[at]))] : null,
      last: known.length ? { step: run.step[known[known.length - 1]], value: raw[known[known.length - 1]] } : null,
      hidden: group.isLog ? known.filter((at) => raw[at] <= 0).length : 0,
    };
  }

  function aligned(own, values, steps, isSparse) {
    if (own.length === steps.length) return isSparse ? values.map((item) => (item === null ? undefined : item)) : values;
    const made = new Array(steps.length).fill(null);
    let at = 0;
    for (let index = 0; index < steps.length; index++) {
      while (at < own.length && own[at] < steps[index]) at++;
      if (at === own.length) break;
      if (own[at] === steps[index]) made[index] = values[at];
      else if (at > 0 && values[at] !== null && values[at - 1] !== null) made[index] = undefined;
    }
    return isSparse ? made.map((item) => (item === null ? undefined : item)) : made;
  }

  const series = (table) => [table.steps, ...table.columns.flatMap((column) => [column.min, column.max, column.mean])];

  /** Points that no line reaches: those between two gaps. */
  function alone(values) {
    const found = [];
    for (let index = 0; index < values.length; index++) {
      if (page.isNumber(values[index]) && !page.isNumber(values[index - 1]) && !page.isNumber(values[index + 1])) found.push(index);
    }
    return found;
  }

  /** A cross at the lower edge for nan and -inf, at the upper one for inf. */
  function drawNotFinite(u, table) {
    const { ctx, bbox } = u;
    const size = 3 * devicePixelRatio;
    ctx.save();
    ctx.strokeStyle = page.color("--alarm");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    ctx.beginPath();
    for (const column of table.columns) {
      for (const item of column.notFinite) {
        if (item.step < u.scales.x.min || item.step > u.scales.x.max) continue;
        const x = u.valToPos(item.step, "x", true);
        const isUp = item.text === "inf" || item.text > LARGEST;
        const y = isUp ? bbox.top + 2 * size : bbox.top + bbox.height - 2 * size;
        ctx.moveTo(x - size, y - size);
        ctx.lineTo(x + size, y + size);
        ctx.moveTo(x - size, y + size);
        ctx.lineTo(x + size, y - size);
      }
    }
    ctx.stroke();
    ctx.restore();
  }

  /** At the cursor, or the last value. */
  function valueText(table, index, group) {
    const isMany = table.columns.length > 1;
    return table.columns.map((column, number) => {
      const at = index === null || index === undefined ? null : nearest(column.raw, index);
      const step = at === null ? column.last && column.last.step : table.steps[at];
      const value = at === null ? column.last && column.last.value : column.raw[at];
      if (!page.isNumber(value)) return null;
      return page.node(
        "span",
        { class: isMany ? `run-${column.color}` : null },
        number === 0 && at !== null && page.node("span", { class: "muted" }, `${page.number(step)}: `),
        page.number(value),
      );
    });
  }

  function nearest(values, index) {
    for (let away = 0; away < 50; away++) {
      for (const at of [index - away, index + away]) if (page.isNumber(values[at])) return at;
    }
    return null;
  }

  /** What must be said of what is drawn. */
  function remarks(table, group) {
    const said = [];
    if (group.smooth) said.push(`line: mean of ${group.smooth} points`);
    for (const column of table.columns) {
      const who = table.columns.length > 1 ? `${column.label}: ` : "";
      const kinds = new Map();
      for (const { text } of column.notFinite) {
        const kind = typeof text === "number" ? "beyond 1e300" : text.replace("-", "\u2212");
        kinds.set(kind, (kinds.get(kind) || 0) + 1);
      }
      const counts = [...kinds].map(([kind, count]) => `${count} \u00d7 ${kind}`);
      if (counts.length) said.push(who + counts.join(", "));
      if (column.hidden) said.push(`${who}${page.counted(column.hidden, "value")} not above 0 left out`);
      if (column.ends) {
        const [low, high] = column.ends;
        const size = Math.max(Math.abs(low), Math.abs(high));
        if (high > low && high - low <= size * FLAT) said.push(`${who}level: all within ${page.number(high - low, 2)}`);
      }
    }
    return said.join("; ");
  }

  function wordsOf(table) {
    const said = table.columns.map((column) => {
      if (column.ends === null) return `${column.label}: no finite value`;
      return `${column.label}: from ${page.number(column.ends[0])} to ${page.number(column.ends[1])}, last ${page.number(column.last.value)} at step ${column.last.step}`;
    });
    return said.join("; ");
  }
})(window.tautPage);
