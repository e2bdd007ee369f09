// Rollouts: the groups of a step, one group with its answers side by side, one prompt over the steps.
"use strict";
(function (page) {
  const SHOWN = 100;
  const SHOWN_ANSWERS = 16;

  page.views.rollouts = async function (context) {
    const run = context.run;
    let steps = (await page.ask("steps", run)).rollouts;
    const step = context.parameters.step === undefined ? steps[steps.length - 1] : Number(context.parameters.step);
    if (step === undefined) {
      page.add(context.root, [page.node("h1", {}, "Rollouts"), page.note("No rollouts are recorded.")]);
      return null;
    }
    if (context.parameters.group !== undefined) return oneGroup(context, step, Number(context.parameters.group));
    const chooser = page.node("div", {});
    const drawChooser = () => page.fill(chooser, page.stepChooser(steps, step, (to) => context.go({ ...context.parameters, step: to })));
    drawChooser();
    const place = page.node("div", {});
    page.add(context.root, [page.node("h1", {}, "Rollouts"), chooser, place]);
    const answer = await page.ask("rollouts", run, { step }).catch((error) => context.failed(error, place));
    if (answer) page.fill(place, groupsOf(context, answer));
    return async () => {
      steps = (await page.ask("steps", run)).rollouts;
      drawChooser();
    };
  };

  // -- the groups of a step

  function groupsOf(context, answer) {
    if (!answer.groups.length) return page.note(`No rollouts are recorded of step ${page.number(answer.step)}.`);
    const filter = {
      signal: context.parameters.signal || "",
      low: context.parameters.low ?? "",
      high: context.parameters.high ?? "",
      finish: context.parameters.finish || "",
      text: context.parameters.text || "",
      sort: context.parameters.sort || "",
    };
    const finishes = [...new Set(answer.groups.flatMap((group) => group.finish || []))].filter(Boolean).sort();
    const list = page.node("div", {});
    const count = page.node("span", { class: "muted", role: "status" });
    const change = (name) => (value) => {
      filter[name] = value;
      context.set({ [name]: value });
      draw();
    };
    const input = (name, label, type, kind) => {
      const made = page.node("input", {
        type,
        step: "any",
        class: kind,
        value: filter[name],
        "aria-label": label,
        "data-key": label,
        on: { input: () => change(name)(made.value) },
      });
      return made;
    };
    const bar = page.node(
      "div",
      { class: "bar" },
      page.select("Signal", [["", "any"], ["yes", "with"], ["no", "without"]], filter.signal, change("signal")),
      page.node("span", { class: "field" }, page.node("span", { class: "label" }, "Reward"), input("low", "reward from", "number", "step"), "\u2013", input("high", "reward to", "number", "step")),
      page.select("End", [["", "any"], ...finishes.map((name) => [name, name])], filter.finish, change("finish")),
      page.field("Prompt has", input("text", "text in the prompt", "search", "text")),
      page.select("Sort by", [["", "group"], ["mean", "mean reward"], ["-mean", "mean reward, high first"], ["-spread", "spread, high first"], ["-length", "length, high first"]], filter.sort, change("sort")),
      count,
    );

    function draw() {
      const found = sorted(answer.groups.filter((group) => fits(group, filter)), filter.sort);
      page.fill(count, `${page.number(found.length)} of ${page.counted(answer.groups.length, "group")}`);
      page.fill(list, page.cut(found, SHOWN, (groups) => tableOf(context, answer.step, groups), "groups", answer.num_left));
    }
    draw();
    return [bar, list];
  }

  /** An answer of the group has a reward within, and one has the end. A search looks at what is listed of the prompt. */
  function fits(group, filter) {
    const hasSignal = !group.why_nothing;
    if (filter.signal && (filter.signal === "yes") !== hasSignal) return false;
    const rewards = (group.rewards || []).filter(page.isNumber);
    if (filter.low !== "" && !rewards.some((reward) => reward >= Number(filter.low))) return false;
    if (filter.high !== "" && !rewards.some((reward) => reward <= Number(filter.high))) return false;
    if (filter.low !== "" && filter.high !== "" && !rewards.some((reward) => reward >= Number(filter.low) && reward <= Number(filter.high))) return false;
    if (filter.finish && !(group.finish || []).includes(filter.finish)) return false;
    return !filter.text || String(group.prompt).toLowerCase().includes(filter.text.toLowerCase());
  }

  function sorted(groups, order) {
    const spread = (group) => {
      const rewards = (group.rewards || []).filter(page.isNumber);
      return rewards.length ? Math.max(...rewards) - Math.min(...rewards) : -1;
    };
    const keys = { mean: (group) => group.mean ?? 0, "-mean": (group) => -(group.mean ?? 0), "-spread": (group) => -spread(group), "-length": (group) => -(page.mean(group.num_tokens) ?? 0) };
    if (!keys[order]) return groups;
    return [...groups].sort((one, other) => keys[order](one) - keys[order](other));
  }

  function tableOf(context, step, groups) {
    return page.table(
      [["group", "number"], ["prompt", "wide"], ["mean", "number"], ["rewards"], ["tokens", "number"], ["end"], ["signal"]],
      groups.map((group) => [
        page.link(page.number(group.group), page.place("rollouts", context.run, { step, group: group.group })),
        [page.node("span", { class: "one-line" }, group.prompt), page.node("span", { class: "sub" }, group.prompt_id)],
        page.fixed(group.mean),
        page.node("span", { class: "rewards" }, (group.rewards || []).slice(0, 16).map((reward) => page.fixed(reward, 2)).join("  "), (group.rewards || []).length > 16 && ` and ${group.rewards.length - 16} more`),
        rangeOf(group.num_tokens),
        page.node("span", { class: "no-wrap" }, tally(group.finish)),
        group.why_nothing ? page.node("span", { class: "warn" }, group.why_nothing) : group.is_kept === false ? "left out" : "yes",
      ]),
      { label: "Groups of the step" },
    );
  }

  function rangeOf(numbers) {
    const found = (numbers || []).filter(page.isNumber);
    if (!found.length) return "";
    const [low, high] = [Math.min(...found), Math.max(...found)];
    return low === high ? page.number(low) : `${page.number(low)}\u2013${page.number(high)}`;
  }

  function tally(names) {
    const counts = new Map();
    for (const name of names || []) counts.set(name, (counts.get(name) || 0) + 1);
    return [...counts].map(([name, count]) => `${count} ${name}`).join(", ");
  }

  // -- one group

  async function oneGroup(context, step, number) {
    const answer = await page.ask("group", context.run, { step, group: number });
    const isTokens = context.parameters.show === "tokens";
    const color = context.parameters.color === "logprob" ? "logprob" : "advantage";
    const back = page.place("rollouts", context.run, { step });
    const redraw = (name, value) => {
      context.set({ [name]: value });
      page.fill(answers, answersOf());
    };
    const show = page.choice("Show", [["text", "text"], ["tokens", "tokens"]], isTokens ? "tokens" : "text", (value) => redraw("show", value === "text" ? null : value));
    const colors = page.choice("Color by", [["advantage", "advantage"], ["logprob", "logprob"]], color, (value) => redraw("color", value === "advantage" ? null : value));
    const answers = page.node("div", {});
    const scaledBy = {
      advantage: answer.answers.flatMap((one) => one.advantage || []),
      logprob: answer.answers.flatMap((one) => one.logp || []),
    };
    const shared = { drawn: [], factsAt: null, scaledBy };
    const forget = () => shared.drawn.splice(0).forEach((tokens) => tokens.destroy());
    context.onLeave(forget);
    const answersOf = () => {
      forget();
      const areTokens = context.parameters.show === "tokens";
      colors.node.hidden = !areTokens;
      shared.factsAt = areTokens ? page.factsPlace() : null;
      const draw = (some) => {
        const made = some.map((one) => answerOf(context, one, shared));
        return [areTokens && shared.drawn.length > 0 && shared.drawn[0].legend, page.node("div", { class: "answers" }, made)];
      };
      return [page.cut(answer.answers, SHOWN_ANSWERS, draw, "answers", answer.num_left), shared.factsAt];
    };
    const to = (other) => page.place("rollouts", context.run, { ...context.parameters, step, group: other });
    page.add(context.root, [
      page.node(
        "div",
        { class: "bar" },
        page.link(`\u2190 Step ${page.number(step)}`, back),
        number > 0 && page.link("Group before", to(number - 1)),
        page.link("Group after", to(number + 1)),
        page.link("This prompt over steps", page.place("prompt", context.run, { id: answer.prompt_id })),
      ),
      page.node("h1", {}, `Group ${page.number(number)} of step ${page.number(step)}`),
      page.note([answer.prompt_id, answer.place && answer.place !== answer.prompt_id ? answer.place : null].filter(Boolean).join(", ")),
      answer.why_nothing && page.node("p", { class: "warn" }, `No signal: ${answer.why_nothing}`),
      page.section("Prompt", page.messages(answer.prompt), (answer.asked || []).length > 0 && page.folded(`As the model reads it: ${page.number(answer.asked.length)} tokens`, () => page.node("code", { class: "block" }, answer.asked.join(""))), (answer.references || []).length > 0 && page.pairs([["references", answer.references.map((text) => page.node("code", { class: "block" }, text))]])),
      page.section("Answers", page.node("div", { class: "bar" }, show.node, colors.node), answers),
    ]);
    page.fill(answers, answersOf());
    return null;
  }

  function answerOf(context, one, shared) {
    const advantage = page.mean(one.advantage);
    const head = [
      ["reward", page.fixed(one.reward)],
      ["advantage", advantage === null ? null : page.signed(advantage, 3)],
      ["tokens", page.number(one.num_tokens)],
      ["end", one.finish_reason],
      ["turns", one.num_turns > 1 ? page.number(one.num_turns) : null],
      ["calls", one.num_calls ? `${page.number(one.num_calls)}${one.num_malformed_calls ? `, ${page.number(one.num_malformed_calls)} malformed` : ""}` : null],
      ["weights", versionsOf(one.version)],
    ].filter(([, value]) => value !== null && value !== undefined && value !== "");
    const parts = one.parts || [];
    return page.node(
      "article",
      { class: "answer" },
      page.node("h3", {}, `Answer ${page.number(one.index)}`, page.node("span", { class: "sub" }, one.sample_id)),
      page.node("dl", { class: "facts-row" }, head.map(([name, value]) => page.node("div", {}, page.node("dt", {}, name), page.node("dd", {}, value)))),
      one.error && page.node("p", { class: "warn" }, one.error),
      parts.length > 0 && page.node("ul", { class: "parts" }, parts.map(partOf)),
      context.parameters.show === "tokens" ? tokensOf(context, one, shared) : page.messages(one.messages),
      asTrained(context.run, one),
    );
  }

  /** A link to the answer's tokens with their losses, where there are some. */
  function asTrained(run, { recorded_at: step, sample_id: id }) {
    if (!page.isNumber(step) || !page.has("sample", run, { step, id })) return null;
    return page.note(page.link("As trained", page.place("samples", run, { step, id, color: "advantage" })));
  }

  function versionsOf(versions) {
    const found = [...new Set(versions || [])].filter(page.isNumber);
    return found.length ? `version ${found.join(", ")}` : null;
  }

  function partOf(part) {
    return page.node(
      "li",
      {},
      page.node("span", { class: "part" }, page.node("span", {}, part.name), page.node("span", { class: "number" }, page.fixed(part.value))),
      part.error && page.node("span", { class: "warn" }, part.error),
      part.reason && page.node("span", { class: "sub" }, part.reason),
      part.reply && page.folded("judge's reply", () => page.node("div", { class: "said" }, part.reply)),
    );
  }

  function tokensOf(context, one, shared) {
    const places = new Map((one.sampled_at || []).map((at, index) => [at, index]));
    const spread = (numbers, sign) => {
      const made = new Array(one.pieces.length).fill(null);
      if (numbers) for (const [at, index] of places) made[at] = page.isNumber(numbers[index]) ? sign * numbers[index] : (numbers[index] ?? null);
      return made;
    };
    const values = { advantage: spread(one.advantage, 1), logprob: spread(one.logp, -1) };
    const first = (one.sampled_at || []).reduce((low, at) => Math.min(low, at), one.pieces.length);
    const tokens = page.tokens({
      label: `Tokens of answer ${one.index}`,
      pieces: one.pieces,
      ids: one.ids,
      from: first,
      values,
      color: context.parameters.color === "logprob" ? "logprob" : "advantage",
      numShared: 0,
      scaledBy: shared.scaledBy,
      factsAt: shared.factsAt,
      isContext: (index) => !places.has(index),
      facts: (index) => {
        if (!places.has(index)) return [["", "not sampled"]];
        return [
          ["logprob", values.logprob[index] === null ? "" : page.number(page.isNumber(values.logprob[index]) ? -values.logprob[index] : values.logprob[index])],
          ["advantage", values.advantage[index] === null ? "" : page.signed(values.advantage[index])],
          ["weights", one.version ? `version ${one.version[places.get(index)]}` : ""],
        ];
      },
    });
    shared.drawn.push(tokens);
    return tokens.text;
  }

  // -- messages

  /** A conversation, a turn below the other. */
  page.messages = function (messages) {
    if (typeof messages === "string") return page.node("div", { class: "said" }, messages);
    return page.node("ol", { class: "turns" }, (messages || []).map(turnOf));
  };

  const SHOWN_KEYS = ["role", "content", "tool_calls", "name", "tool_call_id", "reasoning_content", "thinking"];

  function turnOf(message) {
    if (typeof message !== "object" || message === null) return page.node("li", {}, page.node("div", { class: "said" }, message));
    const thought = message.reasoning_content || message.thinking;
    const others = Object.entries(message).filter(([name, value]) => !SHOWN_KEYS.includes(name) && value !== null && value !== "");
    return page.node(
      "li",
      { class: `turn turn-${String(message.role).replace(/\W/g, "-")}` },
      page.node("span", { class: "role" }, message.role, message.name && ` ${message.name}`, message.tool_call_id && ` ${message.tool_call_id}`),
      thought && [page.node("span", { class: "role" }, " reasons"), page.node("div", { class: "said thought" }, contentOf(thought))],
      page.node("div", { class: "said" }, contentOf(message.content)),
      (message.tool_calls || []).map(callOf),
      others.length > 0 && page.node("div", { class: "sub" }, others.map(([name, value]) => `${name}: ${JSON.stringify(value)}`).join(", ")),
    );
  }

  function contentOf(content) {
    if (content === null || content === undefined) return null;
    if (typeof content === "string") return content;
    if (!Array.isArray(content)) return JSON.stringify(content);
    return content.map((part) => {
      if (typeof part === "string") return part;
      if (part && typeof part.text === "string") return part.text;
      return page.node("span", { class: "tag" }, JSON.stringify(part));
    });
  }

  function callOf(call) {
    const made = call && call.function ? call.function : call;
    if (typeof made !== "object" || made === null) return page.node("div", { class: "call" }, page.node("code", {}, String(made)));
    const given = typeof made.arguments === "string" ? made.arguments : JSON.stringify(made.arguments ?? {}, null, 1);
    return page.node("div", { class: "call" }, page.node("span", { class: "role" }, "calls"), page.node("code", {}, `${made.name}(${given})`));
  }

  // -- one prompt over the steps

  /** The rewards of its answers as a curve: mean, and from the least to the most. */
  function rewardsOf(entries) {
    const of = (entry) => entry.answers.map((one) => one.reward).filter(page.isNumber);
    const ordered = [...entries].sort((one, other) => one.step - other.step);
    const extreme = (pick) => ordered.map((entry) => (of(entry).length ? pick(...of(entry)) : null));
    return { label: "reward", color: 0, step: ordered.map((entry) => entry.step), mean: ordered.map((entry) => entry.mean), min: extreme(Math.min), max: extreme(Math.max) };
  }

  page.views.prompt = async function (context) {
    const id = context.parameters.id;
    const region = page.node("div", {});
    const curve = page.node("div", { class: "charts" });
    page.add(context.root, [page.node("h1", {}, "A prompt over steps"), page.note(id), curve, region]);
    let rewards = null;
    const group = page.chartGroup({ lastStep: () => Math.max(1, ...rewards.step), changed: () => {} });
    context.onLeave(() => group.destroy());
    const chart = page.chart(group, "mean reward", () => rewards && [rewards]);
    const draw = async () => {
      const answer = await page.ask("prompt", context.run, { id });
      rewards = rewardsOf(answer.steps);
      if (answer.steps.length > 1) page.fill(curve, chart.node);
      chart.update();
      const row = (entry) =>
        page.node(
          "section",
          {},
          page.node(
            "h3",
            {},
            page.link(`Step ${page.number(entry.step)}`, page.place("rollouts", context.run, { step: entry.step, group: entry.group })),
            page.node("span", { class: "muted" }, ` mean reward ${page.fixed(entry.mean)}`),
          ),
          page.node(
            "div",
            { class: "answers" },
            entry.answers.map((one) =>
              page.node(
                "article",
                { class: "answer" },
                page.node("p", { class: "part" }, page.node("span", { class: "muted" }, `Answer ${one.index}, ${one.finish_reason || "no end"}`), page.node("span", { class: "number" }, page.fixed(one.reward))),
                page.node("div", { class: "said" }, one.text),
              ),
            ),
          ),
        );
      page.fill(
        region,
        page.section("Prompt", page.messages(answer.prompt)),
        page.section(`Answers at ${page.counted(answer.steps.length, "step")}`, page.cut(answer.steps, 20, (some) => some.map(row), "steps", answer.num_left)),
      );
    };
    await draw();
    return draw;
  };
})(window.tautPage);
