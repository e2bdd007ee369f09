// The page: what the fragment names is drawn; what is drawn is asked again when its run has grown.
"use strict";
(function (page) {
  const TABS = [
    ["overview", "Overview"],
    ["checks", "Checks"],
    ["samples", "Samples"],
    ["rollouts", "Rollouts"],
    ["data", "Data"],
    ["model", "Model"],
  ];
  const PARENT = { prompt: "rollouts", prompts: "compare" };
  const TITLES = { runs: "Runs", compare: "Compare", prompt: "A prompt over steps", prompts: "A prompt side by side" };
  const PAUSE = 1000; // ms between two updates of what is shown

  const main = document.getElementById("main");
  const live = document.getElementById("live");
  let runs = null; // the answer to `runs`
  let current = null; // the context of what is shown

  /** Draw what the fragment names. */
  async function draw() {
    const place = page.readPlace(location.hash);
    if (place.view === "runs" && runs.runs.length === 1) {
      return history.replaceState(null, "", page.place("overview", runs.runs[0].name)), draw();
    }
    const held = main.contains(document.activeElement) ? document.activeElement : null;
    const isSame = current !== null && current.view === place.view && current.run === place.run;
    const scrolled = isSame && main.querySelector(".list") ? main.querySelector(".list").scrollTop : 0;
    if (current !== null) leave(current);
    const context = contextOf(place);
    current = context;
    drawNavigation(place);
    document.title = [TITLES[place.view] || tabName(place.view), place.run, "taut"].filter(Boolean).join(" - ");
    main.setAttribute("aria-busy", "true");
    page.fill(main, context.root);
    window.scrollTo(0, 0);
    try {
      requireKnown(place);
      context.update = await page.views[place.view](context);
    } catch (error) {
      context.failed(error, context.root);
    }
    if (current !== context) return leave(context);
    main.setAttribute("aria-busy", "false");
    if (scrolled && main.querySelector(".list")) main.querySelector(".list").scrollTop = scrolled;
    if (held !== null) (findKey(held.dataset.key) || main).focus({ preventScroll: true });
  }

  const findKey = (key) => key !== undefined && [...main.querySelectorAll("[data-key]")].find((one) => one.dataset.key === key);

  function requireKnown(place) {
    if (!Object.hasOwn(page.views, place.view)) {
      throw new page.Unanswered(`There is no view ${place.view} here. Known: ${Object.keys(page.views).join(", ")}.`);
    }
    const names = runs.runs.map((run) => run.name);
    if (place.run !== null && !names.includes(place.run)) {
      throw new page.Unanswered(`There is no run ${place.run} here. Known: ${names.join(", ") || "none"}.`);
    }
  }

  /** What a view is given. */
  function contextOf(place) {
    const leaving = [];
    const keys = [];
    const context = {
      run: place.run,
      view: place.view,
      parameters: place.parameters,
      get runs() {
        return runs.runs;
      },
      root: page.node("div", { class: `view view-${Object.hasOwn(page.views, place.view) ? place.view : "unknown"}` }),
      update: null,
      leaving,
      keys,
      onLeave: (listener) => leaving.push(listener),
      onKey: (listener) => keys.push(listener),
      /** Note parameters in the place, without drawing anew. */
      set: (changed) => {
        Object.assign(context.parameters, changed);
        for (const [name, value] of Object.entries(changed)) if (value === null || value === "") delete context.parameters[name];
        if (current === context) history.replaceState(null, "", page.place(place.view, place.run, context.parameters));
      },
      go: (parameters) => {
        location.hash = page.place(place.view, place.run, parameters);
      },
      /** Say what is wrong, where the answer would stand. */
      failed: (error, region) => {
        region.append(page.node("p", { class: "error", role: "alert" }, error instanceof page.Unanswered ? error.message : `The page failed: ${error.message}`));
        if (!(error instanceof page.Unanswered)) console.error(error);
      },
    };
    return context;
  }

  const leave = (context) => context.leaving.splice(0).forEach((listener) => listener());
  const tabName = (view) => (TABS.find(([name]) => name === view) || [view, view])[1];

  // -- what stands above

  function drawNavigation(place) {
    const run = place.run ?? (runs.runs.length === 1 ? runs.runs[0].name : null);
    const shown = PARENT[place.view] || place.view;
    const tab = (view, text, href) => page.link(text, href, { class: "tab", "aria-current": shown === view ? "page" : null });
    const isMany = runs.runs.length > 1;
    page.fill(
      document.getElementById("places"),
      page.node("span", { class: "brand" }, "taut"),
      isMany && tab("runs", "Runs", page.place("runs")),
      isMany && tab("compare", "Compare", page.place("compare", null, { runs: place.parameters.runs })),
      isMany && run !== null && runChooser(run, shown),
      run !== null && TABS.map(([view, text]) => tab(view, text, page.place(view, run))),
    );
  }

  function runChooser(run, shown) {
    const view = TABS.some(([name]) => name === shown) ? shown : "overview";
    const made = page.node(
      "select",
      {
        "aria-label": "Run",
        "data-key": "run",
        on: {
          change: () => {
            location.hash = page.place(view, made.value);
          },
        },
      },
      runs.runs.map(({ name }) => page.node("option", { value: name, selected: name === run }, name)),
    );
    return made;
  }

  function drawFoot() {
    const { text, num_left: numLeft } = page.inFile();
    page.fill(
      document.getElementById("foot"),
      page.node("p", {}, `taut ${runs.version}`),
      text && page.node("p", {}, text, numLeft > 0 && ` There was no room for ${page.counted(numLeft, "more answer")}.`),
    );
  }

  page.views.runs = async function (context) {
    const table = page.node("div", {});
    const draw = () => {
      const chosen = new Set((context.parameters.runs || "").split(",").filter(Boolean));
      const button = page.node(
        "button",
        { type: "button", disabled: chosen.size < 2, "data-key": "compare", on: { click: () => (location.hash = page.place("compare", null, { runs: [...chosen].join(",") })) } },
        "Compare",
      );
      const box = (name) =>
        page.node("input", {
          type: "checkbox",
          "aria-label": `compare ${name}`,
          checked: chosen.has(name),
          "data-key": `box ${name}`,
          on: {
            change: (event) => {
              if (event.target.checked) chosen.add(name);
              else chosen.delete(name);
              button.disabled = chosen.size < 2;
              context.set({ runs: [...chosen].join(",") });
            },
          },
        });
      const rows = context.runs.map((run) => [
        context.runs.length > 1 ? box(run.name) : "",
        page.link(run.name, page.place("overview", run.name)),
        run.method,
        [page.stateOf(run.state), run.reason ? page.node("span", { class: "sub" }, run.reason) : null],
        `${page.number(run.step ?? 0)} of ${page.number(run.num_steps)}`,
        page.number(run.loss),
        page.number(run.reward),
        page.number(run.held_out),
        run.best ? `${run.best.metric} ${page.number(run.best.value)} at ${run.best.step}` : "",
        page.isNumber(run.seconds) ? (run.seconds / 3600).toFixed(2) : "",
        run.differs,
        page.time(run.written),
      ]);
      const columns = [["compare"], ["run", "id"], ["method"], ["state"], ["step", "number"], ["loss", "number"], ["reward", "number"], ["held-out", "number"], ["best"], ["hours", "number"], ["differs"], ["last event", "no-wrap"]];
      page.fill(
        table,
        rows.length ? page.cut(rows, 200, (some) => page.table(columns, some, { label: "Runs" }), "runs") : page.note("There is no run here."),
        context.runs.length > 1 && page.node("div", { class: "bar" }, button),
      );
    };
    page.add(context.root, [page.node("h1", {}, "Runs"), table]);
    draw();
    return draw;
  };

  // -- live

  const grown = new Set();
  let isUpdating = false;

  async function update() {
    if (isUpdating || !grown.size) return;
    isUpdating = true;
    const names = new Set(grown);
    grown.clear();
    const context = current;
    try {
      runs = await page.ask("runs");
      const isShown = context.run === null || names.has(context.run) || names.has(null);
      if (isShown && context.update) await context.update();
    } catch (error) {
      if (!(error instanceof page.Unanswered)) throw error;
      say("lost", error.message);
    } finally {
      isUpdating = false;
      if (grown.size) setTimeout(update, PAUSE);
    }
  }

  function say(state, text) {
    live.className = state;
    page.fill(live, text);
  }

  function begin() {
    addEventListener("hashchange", draw);
    document.getElementById("skip").addEventListener("click", () => main.focus());
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea")) return;
      if (current !== null && current.keys.some((listener) => listener(event.key))) event.preventDefault();
    });
    page.listen(
      (run) => {
        grown.add(run);
        setTimeout(update, PAUSE);
      },
      (state) => say(state, state === "live" ? "live" : "Connection lost. What is shown is as it was; trying again."),
    );
  }

  async function open() {
    page.fill(main, page.note("Reading the runs."));
    try {
      runs = await page.ask("runs");
    } catch (error) {
      if (!(error instanceof page.Unanswered)) throw error;
      return page.fill(main, page.node("p", { class: "error", role: "alert" }, error.message));
    }
    drawFoot();
    begin();
    await draw();
  }

  open();
})(window.tautPage);
