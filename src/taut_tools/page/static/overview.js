// A run at a glance: its state, its curves, evaluations, alarms and decisions; and its checks.
"use strict";
(function (page) {
  const POINTS = 1000;
  const SHOWN = 50;
  const NAMES = 40; // curves in one question

  page.views.overview = async function (context) {
    const run = context.run;
    let answer = await page.ask("overview", run);
    const curves = page.curvesOf([run], page.zoomOf(context.parameters));
    const head = page.node("div", { class: "head" });
    const evaluations = page.node("div", {});
    const alarms = page.node("div", {});
    const about = page.node("section", {});
    let shownNames = answer.curves.length;

    const group = page.chartGroup({
      zoom: page.zoomOf(context.parameters),
      isLog: context.parameters.log === "1",
      smooth: Number(context.parameters.smooth),
      lastStep: () => answer.step || 1,
      changed: (now) => {
        context.set(page.chartParameters(now));
        refine();
      },
    });
    context.onLeave(() => group.destroy());
    const refine = page.refiner(curves, group);

    const marks = () => (answer.alarms || []).filter((alarm) => page.isNumber(alarm.step)).map((alarm) => ({ step: alarm.step, text: `step ${alarm.step}: ${alarm.name}`, href: placeOfAlarm(run, alarm) }));
    const charts = page.node("div", {});
    const drawCharts = () =>
      page.fill(charts, page.curveSections(group, curves, answer.headline || [], answer.curves || [], marks, context));

    const drawRest = () => {
      page.fill(head, headOf(answer));
      page.fill(evaluations, evaluationsOf(answer));
      page.fill(alarms, alarmsOf(run, answer));
      page.fill(about, decisionsOf(answer), startOf(answer), (answer.resumes || []).length > 0 && page.folded(`Resumes (${answer.resumes.length})`, () => resumesOf(answer.resumes)), answer.end && page.folded("End", () => page.tree(answer.end)));
    };
    drawRest();
    page.add(context.root, [
      page.node("h1", {}, run),
      head,
      answer.curves.length > 0 && [page.node("h2", { class: "beside" }, "Curves"), group.controls],
      charts,
      evaluations,
      alarms,
      about,
    ]);
    drawCharts();
    return async () => {
      answer = await page.ask("overview", run);
      drawRest();
      if (answer.curves.length !== shownNames) {
        shownNames = answer.curves.length;
        drawCharts();
      }
      await curves.again();
      group.update();
    };
  };

  const placeOfAlarm = (run, alarm) =>
    page.place("samples", run, { step: alarm.step, id: alarm.sample_ids && alarm.sample_ids.length ? alarm.sample_ids[0] : null });

  page.stateOf = (state) => page.node("span", { class: `state state-${String(state).replace(/\W/g, "-")}` }, state);

  function headOf(answer) {
    const numAlarms = (answer.alarms || []).length + (answer.num_left || 0);
    return page.node(
      "dl",
      { class: "facts-row" },
      [
        ["state", [page.stateOf(answer.state), answer.reason && page.node("span", { class: "muted" }, ` ${answer.reason}`)]],
        ["method", answer.method],
        ["step", `${page.number(answer.step ?? 0)} of ${page.number(answer.num_steps)}`],
        ["alarms", page.number(numAlarms)],
        ["curves not listed", answer.num_unlisted ? page.number(answer.num_unlisted) : ""],
        ["began", page.time(answer.started)],
        ["last event", page.time(answer.written)],
        ["directory", answer.out],
      ]
        .filter(([, value]) => value !== "" && value !== null && value !== undefined)
        .map(([name, value]) => page.node("div", {}, page.node("dt", {}, name), page.node("dd", {}, value))),
    );
  }

  function evaluationsOf(answer) {
    const rows = answer.evals || [];
    if (!rows.length) return null;
    const names = [...new Set(rows.map((row) => row.name))];
    const steps = [...new Set(rows.map((row) => row.step))].sort((one, other) => other - one);
    const found = new Map(rows.map((row) => [`${row.step} ${row.name}`, row]));
    const best = answer.best;
    const cells = (step) =>
      names.map((name) => {
        const row = found.get(`${step} ${name}`);
        return row ? page.interval(row.value, row.low, row.high) : "";
      });
    const list = steps.map((step) => ({
      class: best && best.step === step ? "best" : null,
      cells: [[page.number(step), best && best.step === step ? page.node("span", { class: "tag" }, "best") : null], ...cells(step)],
    }));
    const draw = (some) => page.table([["step", "number"], ...names.map((name) => [name, "number"])], some, { label: "Evaluations" });
    return page.section("Evaluations", page.cut(list, 20, draw, "evaluations"));
  }

  /** A value, and its interval where there is one. */
  page.interval = (value, low, high) => [
    page.number(value),
    low === null || low === undefined ? null : page.node("span", { class: "muted" }, ` [${page.number(low, 3)}, ${page.number(high, 3)}]`),
  ];

  function alarmsOf(run, answer) {
    const rows = answer.alarms || [];
    if (!rows.length) return null;
    const draw = (some) =>
      page.table(
        [["step", "number"], ["alarm"], ["what was found", "wide"], ["samples"]],
        some.map((alarm) => [
          page.isNumber(alarm.step) ? page.link(page.number(alarm.step), page.place("samples", run, { step: alarm.step })) : "",
          alarm.name,
          alarm.detail,
          (alarm.sample_ids || []).slice(0, 4).map((id, index) => [index ? ", " : "", page.link(id, page.place("samples", run, { step: alarm.step, id }))]),
        ]),
        { label: "Alarms" },
      );
    const list = page.cut(rows, SHOWN, draw, "alarms", answer.num_left);
    return page.section("Alarms", list);
  }

  function decisionsOf(answer) {
    const rows = answer.decisions || [];
    if (!rows.length) return null;
    return page.folded(`Decisions (${rows.length})`, () =>
      page.table(
        [["decision"], ["value"], ["reason", "wide"]],
        rows.map((row) => [row.name, page.node("code", {}, row.value), row.reason]),
        { label: "Decisions" },
      ),
    { key: "decisions" });
  }

  const resumesOf = (rows) =>
    page.table([["time", "no-wrap"], ["from step", "number"]], rows.map((row) => [page.time(row.time), page.number(row.from_step)]), { label: "Resumes" });

  function startOf(answer) {
    return answer.start && page.folded("Start", () => page.tree(answer.start));
  }

  // -- curves of one run or of several

  page.zoomOf = function (parameters) {
    const [from, to] = [Number(parameters.from), Number(parameters.to)];
    return parameters.to !== undefined && to > from ? [from, to] : null;
  };

  page.chartParameters = (group) => ({
    log: group.isLog ? "1" : null,
    smooth: group.smooth || null,
    from: group.zoom ? Math.round(group.zoom[0]) : null,
    to: group.zoom ? Math.round(group.zoom[1]) : null,
  });

  /** The curves of some runs, asked for by name when they are first wanted. */
  page.curvesOf = function (runs, range) {
    const kept = new Map(); // name -> one {step, mean, min, max} a run, or null

    async function load(names) {
      for (let start = 0; start < names.length; start += NAMES) await loadSome(names.slice(start, start + NAMES));
    }

    async function loadSome(names) {
      const answers = await Promise.all(
        runs.map(async (run) => {
          const asked = { names, points: POINTS, from: range && range[0], to: range && range[1] };
          return page.ask("curves", run, asked);
        }),
      );
      for (const name of names) {
        kept.set(
          name,
          answers.map((answer) => {
            const found = answer.series[name];
            return found ? { step: answer.step, ...found } : null;
          }),
        );
      }
    }

    return {
      load: (names) => {
        const missing = names.filter((name) => !kept.has(name));
        return missing.length ? load(missing) : Promise.resolve();
      },
      /** Ask again for what was asked for. */
      again: () => (kept.size ? load([...kept.keys()]) : Promise.resolve()),
      setRange: (now) => {
        range = now;
      },
      data: (name) => {
        if (!kept.has(name)) return null;
        return kept
          .get(name)
          .map((found, index) => found && { label: runs[index], color: index % 8, ...found })
          .filter((found) => found !== null);
      },
    };
  };

  /** After a zoom: the same number of points of fewer steps, where the server can be asked. */
  page.refiner = function (curves, group) {
    let asked = JSON.stringify(group.zoom);
    return async () => {
      const now = JSON.stringify(group.zoom);
      if (page.isFile || now === asked) return;
      asked = now;
      curves.setRange(group.zoom ? group.zoom.map(Math.round) : null);
      await curves.again();
      group.redraw();
    };
  };

  /** The headline's charts, and the rest folded by prefix. What is open is in the place. */
  page.curveSections = function (group, curves, headline, all, marks, context) {
    for (const chart of group.charts) chart.destroy();
    group.charts.clear();
    const open = new Set((context.parameters.open || "").split(",").filter(Boolean));
    const grid = (names, withMarks) => {
      const charts = names.map((name) => page.chart(group, name, () => curves.data(name), withMarks ? marks : undefined));
      const made = page.node("div", { class: "charts" }, charts.map((chart) => chart.node));
      curves
        .load(names)
        .then(() => charts.forEach((chart) => chart.rebuild()))
        .catch((error) => context.failed(error, made));
      return made;
    };
    const rest = new Map();
    for (const name of all) {
      if (headline.includes(name)) continue;
      const prefix = name.includes("/") ? name.split("/").slice(0, name.split("/").length > 2 ? 2 : 1).join("/") : "other";
      if (!rest.has(prefix)) rest.set(prefix, []);
      rest.get(prefix).push(name);
    }
    return [
      headline.length > 0 && grid(headline, true),
      [...rest].map(([prefix, names]) =>
        page.folded(`${prefix} (${names.length})`, () => grid(names, false), {
          key: prefix,
          isOpen: open.has(prefix),
          onToggle: (isOpen) => {
            if (isOpen) open.add(prefix);
            else open.delete(prefix);
            context.set({ open: [...open].join(",") || null });
          },
        }),
      ),
    ];
  };

  // -- checks

  const OUTCOMES = [
    ["failed", "Failed"],
    ["warning", "Warnings"],
    ["passed", "Passed"],
    ["skipped", "Not relevant here"],
  ];

  page.views.checks = async function (context) {
    const region = page.node("div", {});
    const draw = async () => {
      const answer = await page.ask("checks", context.run);
      const groups = new Map(answer.groups.map((group) => [group.outcome, group.checks]));
      const known = OUTCOMES.map(([outcome]) => outcome);
      const others = [...groups.keys()].filter((outcome) => !known.includes(outcome)).map((outcome) => [outcome, outcome]);
      const parts = [...OUTCOMES, ...others].filter(([outcome]) => groups.has(outcome) && groups.get(outcome).length);
      page.fill(
        region,
        !parts.length && page.note("No check is recorded."),
        parts.map(([outcome, title]) => {
          const checks = groups.get(outcome);
          if (outcome === "failed" || outcome === "warning") {
            return page.section(`${title} (${checks.length})`, checks.map((check) => page.checkOf({ ...check, outcome })));
          }
          return page.folded(`${title} (${checks.length})`, () => tableOf(checks), { key: outcome });
        }),
      );
    };
    page.add(context.root, [page.node("h1", {}, "Checks"), region]);
    await draw();
    return draw;
  };

  /** A check with all that is known of it. */
  page.checkOf = function (check) {
    const evidence = [...(check.evidence || []), ...(check.notes || [])];
    return page.node(
      "article",
      { class: `check check-${check.outcome}` },
      page.node("h3", {}, check.name, page.node("span", { class: "muted" }, valueOf(check))),
      page.node("p", { class: "prose" }, check.detail),
      check.remedy && page.node("p", { class: "prose" }, page.node("span", { class: "label" }, "Do"), check.remedy),
      evidence.length > 0 && page.node("ul", { class: "evidence" }, evidence.map((line) => page.node("li", {}, typeof line === "string" ? line : JSON.stringify(line)))),
    );
  };

  const valueOf = (check) => (check.value === null || check.value === undefined ? null : ` ${page.number(check.value)}${check.unit ? ` ${check.unit}` : ""}`);

  function tableOf(checks) {
    return page.table(
      [["check"], ["value", "number"], ["found", "wide"], ["seconds", "number"]],
      checks.map((check) => [check.name, valueOf(check), check.detail, page.isNumber(check.seconds) ? page.fixed(check.seconds, 2) : ""]),
      { label: "Checks" },
    );
  }
})(window.tautPage);
