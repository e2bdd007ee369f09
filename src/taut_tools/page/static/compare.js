// Runs side by side: their curves over each other, what differs, evaluations, the same prompts.
"use strict";
(function (page) {
  page.views.compare = async function (context) {
    const runs = (context.parameters.runs || "").split(",").filter(Boolean);
    page.add(context.root, [page.node("h1", {}, "Compare")]);
    const known = context.runs.map((run) => run.name);
    if (runs.length < 2) {
      page.add(context.root, [page.chooser(context, runs)]);
      return null;
    }
    const unknown = runs.find((run) => !known.includes(run));
    if (unknown !== undefined) throw new page.Unanswered(`There is no run ${unknown} here. Known: ${known.join(", ")}.`);
    let answer = await page.ask("compare", null, { runs });
    const overview = await page.ask("overview", runs[0]);
    const curves = page.curvesOf(runs, page.zoomOf(context.parameters));
    const group = page.chartGroup({
      zoom: page.zoomOf(context.parameters),
      isLog: context.parameters.log === "1",
      smooth: Number(context.parameters.smooth),
      lastStep: () => Math.max(1, ...context.runs.filter((run) => runs.includes(run.name)).map((run) => run.step || 1)),
      changed: (now) => {
        context.set(page.chartParameters(now));
        refine();
      },
    });
    context.onLeave(() => group.destroy());
    const refine = page.refiner(curves, group);
    const charts = page.node("div", {});
    const rest = page.node("div", {});
    const headline = (overview.headline || []).filter((name) => answer.curves.includes(name));
    const drawRest = () => page.fill(rest, differencesOf(answer, runs), evaluationsOf(answer, runs), promptsOf(answer, runs));
    page.add(context.root, [
      page.node("ul", { class: "legend-runs" }, runs.map((run, index) => page.node("li", { class: `run-${index % 8}` }, page.node("span", { class: `line line-${index % 4}` }), page.link(run, page.place("overview", run))))),
      page.chooser(context, runs),
      page.node("h2", { class: "beside" }, "Curves"),
      group.controls,
      charts,
      rest,
    ]);
    page.fill(charts, page.curveSections(group, curves, headline, answer.curves, () => [], context));
    drawRest();
    return async () => {
      answer = await page.ask("compare", null, { runs });
      drawRest();
      await curves.again();
      group.update();
    };
  };

  /** Which runs are compared. */
  page.chooser = function (context, chosen) {
    const boxes = context.runs.map((run) => {
      const box = page.node("input", { type: "checkbox", checked: chosen.includes(run.name), value: run.name, on: { change: () => ready() } });
      return { box, node: page.node("label", { class: "field" }, box, run.name) };
    });
    const names = () => boxes.filter(({ box }) => box.checked).map(({ box }) => box.value);
    const button = page.node("button", { type: "button", on: { click: () => (location.hash = page.place("compare", null, { runs: names().join(",") })) } }, "Compare");
    const ready = () => {
      button.disabled = names().length < 2;
    };
    ready();
    return page.folded("Choose runs", () => page.node("div", { class: "bar" }, boxes.map(({ node }) => node), button), { isOpen: chosen.length < 2 });
  };

  const KINDS = [
    ["configuration", "Configuration"],
    ["data", "Data"],
    ["model", "Model"],
    ["versions", "Versions"],
  ];

  function differencesOf(answer, runs) {
    const rows = answer.differences || [];
    if (!rows.length) return page.section("What differs", page.note("Nothing that is recorded."));
    const order = new Map(KINDS.map(([kind], index) => [kind, index]));
    const ranked = [...rows].sort((one, other) => (order.get(one.kind) ?? 9) - (order.get(other.kind) ?? 9));
    const draw = (some) =>
      page.table(
        [["kind"], ["key"], ...runs.map((run) => [run, "wide"])],
        some.map((row) => [row.kind, page.node("code", {}, row.key), ...row.values.map((value) => (value === null ? page.node("span", { class: "muted" }, "not there") : typeof value === "object" ? JSON.stringify(value) : page.number(value, 8)))]),
        { label: "What differs" },
      );
    return page.section("What differs", page.cut(ranked, 100, draw, "differences"));
  }

  function evaluationsOf(answer, runs) {
    const rows = answer.evals || [];
    if (!rows.length) return null;
    return page.section(
      "Evaluations",
      page.table(
        [["evaluation"], ["step", "number"], ...runs.map((run) => [run, "number"]), ["difference", "number"]],
        rows.map((row) => [row.name, stepsOf(row.steps), ...row.values.map((value, index) => page.interval(value, (row.lows || [])[index], (row.highs || [])[index])), page.isNumber(row.difference) ? [page.signed(row.difference), page.interval("", row.low, row.high)[1]] : ""]),
        { label: "Evaluations" },
      ),
    );
  }

  function stepsOf(steps) {
    const found = [...new Set(steps || [])];
    return found.map((step) => page.number(step)).join(", ");
  }

  function promptsOf(answer, runs) {
    const rows = answer.prompts || [];
    if (!rows.length) return null;
    const draw = (some) =>
      page.table(
        [["prompt", "id"], ...runs.map((run) => [`${run}: first and last mean reward`, "number"]), ["answers"]],
        some.map((row) => [
          row.prompt_id,
          ...runs.map((run, index) => {
            const rewards = (row.rewards[index] || []).filter((reward) => reward !== null);
            if (!rewards.length) return "";
            const text = rewards.length > 1 ? `${page.fixed(rewards[0])} \u2192 ${page.fixed(rewards[rewards.length - 1])}` : page.fixed(rewards[0]);
            return page.link(text, page.place("prompt", run, { id: row.prompt_id }), { "aria-label": `${row.prompt_id} in ${run}: ${text}` });
          }),
          page.link("side by side", page.place("prompts", null, { runs: runs.join(","), id: row.prompt_id })),
        ]),
        { label: "The same prompts" },
      );
    return page.section("The same prompts", page.cut(rows, 50, draw, "prompts", answer.num_left));
  }

  /** The same prompt in several runs: the answers at each step side by side. */
  page.views.prompts = async function (context) {
    const runs = (context.parameters.runs || "").split(",").filter(Boolean);
    const id = context.parameters.id;
    const answers = await Promise.all(runs.map((run) => page.ask("prompt", run, { id })));
    const steps = [...new Set(answers.flatMap((answer) => answer.steps.map((entry) => entry.step)))].sort((one, other) => one - other);
    const columns = (step) =>
      runs.map((run, index) => {
        const entry = answers[index].steps.find((one) => one.step === step);
        return page.node(
          "div",
          { class: "answer" },
          page.node("h3", {}, run, entry && page.node("span", { class: "muted" }, ` mean reward ${page.fixed(entry.mean)}`)),
          entry === undefined
            ? page.note("not sampled in this step")
            : entry.answers.map((one) => page.node("div", { class: "one" }, page.node("p", { class: "part" }, page.node("span", { class: "muted" }, `Answer ${one.index}, ${one.finish_reason || "no end"}`), page.node("span", { class: "number" }, page.fixed(one.reward))), page.node("div", { class: "said" }, one.text))),
        );
      });
    const row = (step) => page.node("section", {}, page.node("h2", {}, `Step ${page.number(step)}`), page.node("div", { class: "answers" }, columns(step)));
    page.add(context.root, [
      page.node("div", { class: "bar" }, page.link("\u2190 Compare", page.place("compare", null, { runs: runs.join(",") }))),
      page.node("h1", {}, "The same prompt side by side"),
      page.note(id),
      answers.length > 0 && page.section("Prompt", page.messages(answers[0].prompt)),
      page.cut(steps, 20, (some) => some.map(row), "steps"),
    ]);
    return null;
  };
})(window.tautPage);
