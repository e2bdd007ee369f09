// The samples of a step, and every token of one, colored by what trained it.
"use strict";
(function (page) {
  const SHOWN = 100;
  const KEYS = { l: "loss", w: "weight", a: "advantage", e: "entropy", r: "ratio" };

  page.views.samples = async function (context) {
    const run = context.run;
    let { steps } = await page.ask("steps", run);
    const wanted = Number(context.parameters.step);
    const step = context.parameters.step === undefined ? steps[steps.length - 1] : wanted;
    page.add(context.root, [page.node("h1", {}, "Samples")]);
    if (step === undefined) {
      page.add(context.root, [page.note("No tokens are recorded (log.tokens).")]);
      return null;
    }
    const chooser = page.node("div", {});
    const drawChooser = () => page.fill(chooser, page.stepChooser(steps, step, (to) => context.go({ ...context.parameters, step: to, id: null })));
    drawChooser();
    const list = page.node("div", { class: "list" });
    const shown = page.node("div", { class: "shown" });
    page.add(context.root, [chooser, page.node("div", { class: "list-and-one" }, list, shown)]);

    const answer = await page.ask("samples", run, { step });
    const recorded = answer.samples.filter((sample) => sample.is_recorded);
    const id = context.parameters.id ?? (recorded.length ? recorded[0].id : null);
    page.fill(list, listOf(context, answer, id));
    if (id === null) page.fill(shown, page.note(`No tokens are recorded of step ${page.number(step)}.`));
    else await drawSample(context, shown, step, id, new Set(recorded.map((sample) => sample.id))).catch((error) => context.failed(error, shown));
    return async () => {
      steps = (await page.ask("steps", run)).steps;
      drawChooser();
    };
  };

  /** A step: before, after, and by number. */
  page.stepChooser = function (steps, step, go) {
    const before = steps.filter((one) => one < step).pop();
    const after = steps.find((one) => one > step);
    const button = (text, label, to) =>
      page.node("button", { type: "button", "aria-label": label, disabled: to === undefined, "data-key": label, on: { click: () => go(to) } }, text);
    const input = page.node("input", {
      type: "number",
      class: "step",
      value: String(step),
      min: "0",
      "data-key": "step",
      on: { change: () => input.value !== "" && go(nearest(Number(input.value))) },
    });
    const nearest = (to) => steps.reduce((best, one) => (Math.abs(one - to) < Math.abs(best - to) ? one : best), steps[0] ?? to);
    const last = steps[steps.length - 1];
    return page.node(
      "div",
      { class: "bar" },
      page.field("Step", input),
      button("\u2190", "Step before", before),
      button("\u2192", "Step after", after),
      button("Newest", "Newest step", last === step ? undefined : last),
      page.node("span", { class: "muted" }, steps.length ? `${page.counted(steps.length, "step")} recorded, ${page.number(steps[0])} to ${page.number(last)}` : ""),
    );
  };

  function listOf(context, answer, id) {
    const facts = [
      page.isNumber(answer.loss) || typeof answer.loss === "string" ? `loss ${page.number(answer.loss)}` : null,
      answer.grad_norm === null || answer.grad_norm === undefined ? null : `gradient norm ${page.number(answer.grad_norm)}`,
      answer.num_targets ? page.counted(answer.num_targets, "target") : null,
    ].filter(Boolean);
    const draw = (samples) =>
      page.table(
        [["nats", "number"], ["sample", "id"], ["recorded as", "muted"]],
        samples.map((sample) => ({
          class: sample.id === id ? "is-current" : null,
          cells: [
            page.fixed(sample.nll, 3),
            sample.is_recorded
              ? page.link(sample.id, page.place("samples", context.run, { ...context.parameters, step: answer.step, id: sample.id }), {
                  "aria-current": sample.id === id ? "true" : null,
                })
              : page.node("span", { class: "muted" }, sample.id),
            sample.why || "",
          ],
        })),
        { label: "Samples of the step", class: "compact" },
      );
    return [
      page.note(facts.join(", ")),
      page.cut(answer.samples, SHOWN, draw, "samples", answer.num_left),
    ];
  }

  async function drawSample(context, place, step, id, recorded) {
    const answer = await page.ask("sample", context.run, { step, id });
    const numTokens = answer.pieces.length;
    const targets = new Map(answer.target_at.map((at, index) => [at, index]));
    const spread = (numbers) => {
      const made = new Array(numTokens).fill(null);
      if (numbers) for (const [at, index] of targets) made[at] = numbers[index] ?? null;
      return made;
    };
    const streams = answer.streams || {};
    const values = {
      loss: spread(answer.loss),
      weight: spread(answer.weight),
      advantage: spread(streams.advantage_N),
      entropy: spread(answer.entropy),
      ratio: spread(streams.ratio_N),
    };
    const names = Object.keys(values);
    const color = names.includes(context.parameters.color) ? context.parameters.color : "loss";
    const reads = new Map((answer.read_at || []).map((at, index) => [at, (answer.scalar || [])[index]]));
    const tokens = page.tokens({
      label: `Tokens of ${answer.id}`,
      pieces: answer.pieces,
      ids: answer.ids,
      values,
      color,
      numShared: answer.num_shared || 0,
      isContext: (index) => !targets.has(index),
      facts: (index) => factsOf(index, targets.get(index), answer, values, streams, reads),
    });
    context.onLeave(() => tokens.destroy());
    const recolor = (name) => {
      tokens.recolor(name);
      page.fill(most, mostOf(name));
      context.set({ color: name === "loss" ? null : name });
    };
    const choice = page.choice(
      "Color by",
      names.map((name) => [name, [page.node("u", {}, name[0]), name.slice(1)], name[0]]),
      color,
      recolor,
    );
    context.onKey((key) => {
      if (KEYS[key] === undefined) return false;
      choice.press(KEYS[key]);
      return true;
    });
    const most = page.node("p", { class: "most" });
    const mostOf = (name) => {
      const ranked = [...targets.keys()]
        .filter((at) => page.isNumber(values[name][at]))
        .sort((one, other) => values[name][other] - values[name][one])
        .slice(0, 6);
      if (!ranked.length) return null;
      return [
        page.node("span", { class: "label" }, `Highest ${name}`),
        ranked.map((at) =>
          page.node(
            "button",
            { type: "button", class: "token-link", "data-key": `most ${at}`, on: { click: () => tokens.go(at) } },
            page.node("code", {}, page.tokenName(answer.pieces[at])),
            ` ${page.number(values[name][at], 3)}`,
          ),
        ),
      ];
    };
    page.fill(most, mostOf(color));
    page.fill(
      place,
      page.node("h2", { class: "id" }, answer.id),
      aboutOf(context, answer, targets.size, recorded),
      page.node("div", { class: "bar" }, choice.node),
      tokens.legend,
      most,
      tokens.text,
      tokens.facts,
      Object.keys(answer.values || {}).length > 0 && page.folded("Values of the sample", () => page.tree(answer.values)),
      (answer.pictures || []).length > 0 &&
        page.folded(`Pictures (${answer.pictures.length})`, () =>
          page.table(
            [["tokens"], ["file", "wide"]],
            answer.pictures.map((picture) => [`${page.number(picture.start)} to ${page.number(picture.stop)}`, picture.file]),
          ),
        ),
    );
  }

  function aboutOf(context, answer, numTargets, recorded) {
    const others = answer.shared_with || [];
    const parts = [`${page.counted(answer.pieces.length, "token")}, ${page.counted(numTargets, "target")}${answer.why ? `; recorded as: ${answer.why}` : ""}`];
    const elsewhere = (answer.steps || []).filter((step) => step !== answer.step);
    const at = (step, id) => page.place("samples", context.run, { ...context.parameters, step, id });
    return [
      page.note(parts),
      answer.num_shared > 0 &&
        page.note(
          "The first ",
          page.node("span", { class: "shared" }, page.counted(answer.num_shared, "token")),
          " are computed once for it and ",
          others.length ? others.map((id, index) => [index ? ", " : "", recorded.has(id) ? page.link(id, at(answer.step, id)) : id]) : "others",
        ),
      elsewhere.length > 0 &&
        page.note("Also recorded in step ", elsewhere.slice(0, 30).map((step, index) => [index ? ", " : "", page.link(page.number(step), at(step, answer.id))])),
    ];
  }

  function factsOf(index, target, answer, values, streams, reads) {
    const pairs = [];
    if (target === undefined) pairs.push(["", "context"]);
    else {
      const loss = values.loss[index];
      if (loss !== null) pairs.push(["logprob", page.number(page.isNumber(loss) ? -loss : loss)]);
      if (page.isNumber(loss)) pairs.push(["probability", page.number(Math.exp(-loss), 3)]);
      for (const name of ["weight", "advantage", "ratio"]) {
        if (values[name][index] !== null) pairs.push([name, page.number(values[name][index])]);
      }
      const clipped = streams.clipped_N && streams.clipped_N[target];
      if (clipped !== undefined && clipped !== null) pairs.push(["clipped", clipped ? "yes" : "no"]);
      if (values.entropy[index] !== null) pairs.push(["entropy", page.number(values.entropy[index])]);
      for (const [name, numbers] of Object.entries(streams)) {
        if (["advantage_N", "ratio_N", "clipped_N"].includes(name) || !numbers) continue;
        pairs.push([name.replace(/_N$/, ""), page.number(numbers[target])]);
      }
    }
    if (reads.has(index)) pairs.push(["scalar", page.number(reads.get(index))]);
    if (index < (answer.num_shared || 0)) pairs.push(["", "shared"]);
    return pairs;
  }
})(window.tautPage);
