// What a run was trained on, and what it left: data and model.
"use strict";
(function (page) {
  const SHOWN = 50;
  const SET_KEYS = ["name", "lengths", "dropped", "cut", "num_dropped", "num_cut"];

  page.views.data = async function (context) {
    const region = page.node("div", {});
    const draw = async () => {
      const answer = await page.ask("data", context.run);
      const sets = answer.sets || [];
      const checks = (answer.checks || []).filter((check) => check.outcome === "failed" || check.outcome === "warning");
      page.fill(
        region,
        answer.summary && page.note(answer.summary),
        sets.length ? sets.map(setOf) : page.note("Nothing is recorded of the sets."),
        answer.duplicates && page.section("Duplicates", page.checkOf(answer.duplicates)),
        checks.length > 0 && page.section("Checks of the data", checks.map(page.checkOf)),
      );
    };
    page.add(context.root, [page.node("h1", {}, "Data"), region]);
    await draw();
    return draw;
  };

  function setOf(set) {
    const others = Object.entries(set).filter(([name]) => !SET_KEYS.includes(name));
    return page.section(
      set.name,
      page.pairs(others.map(([name, value]) => [wordsOf(name), value === null ? null : page.tree(value)])),
      set.lengths && set.lengths.counts && set.lengths.counts.length > 0 && histogram(set.lengths, `Lengths of the samples of ${set.name}`),
      listOf("Dropped", set.dropped, [["place", "id"], ["reason", "wide"]], (row) => [row.place, row.reason], left(set.num_dropped, set.dropped)),
      listOf("Cut", set.cut, [["place", "id"], ["reason", "wide"]], (row) => [row.place, row.reason], left(set.num_cut, set.cut)),
    );
  }

  const left = (count, rows) => Math.max(0, (count || 0) - (rows || []).length);
  const wordsOf = (name) => name.replace(/^num_/, "").replaceAll("_", " ");

  function listOf(title, rows, columns, cells, numMore) {
    if (!rows || !rows.length) return null;
    const count = rows.length + (numMore || 0);
    return page.folded(`${title} (${page.number(count)})`, () => page.cut(rows, SHOWN, (some) => page.table(columns, some.map(cells), { label: title }), "rows", numMore), { isOpen: rows.length <= 10 });
  }

  /** Counts between edges as bars, and as a table for those who cannot see them. */
  function histogram({ edges, counts }, label) {
    const [width, height, below] = [600, 120, 18];
    const most = Math.max(...counts, 1);
    const each = Math.min(width / counts.length, 40); // few bars are no wall
    const every = Math.max(1, Math.ceil(counts.length / 8));
    const bars = counts.map((count, index) => {
      const high = (count / most) * height;
      return page.svg(
        "rect",
        { x: index * each + 0.5, y: height - high, width: Math.max(each - 1, 0.5), height: high, class: "bar-of" },
        page.svg("title", {}, `${page.number(edges[index])} to ${page.number(edges[index + 1])} tokens: ${page.number(count)}`),
      );
    });
    const texts = counts.map((_, index) =>
      index % every ? null : page.svg("text", { x: index * each, y: height + below - 4, class: "bar-text" }, page.number(edges[index])),
    );
    const drawn = page.svg("svg", { viewBox: `0 0 ${width} ${height + below}`, class: "histogram", role: "img", "aria-label": `${label}, at most ${page.number(most)} in a bar` }, bars, texts);
    const table = () =>
      page.table(
        [["from", "number"], ["to", "number"], ["samples", "number"]],
        counts.map((count, index) => [page.number(edges[index]), page.number(edges[index + 1]), page.number(count)]),
        { label },
      );
    return page.node("div", {}, page.node("h3", {}, "Lengths in tokens"), drawn, page.folded("Lengths as a table", table));
  }

  page.views.model = async function (context) {
    const region = page.node("div", {});
    const draw = async () => {
      const answer = await page.ask("model", context.run);
      const others = Object.entries(answer).filter(([name]) => !["contract", "stop", "stop_check", "goldens", "num_left"].includes(name));
      const goldens = answer.goldens || [];
      page.fill(
        region,
        page.section("Answers that stop", answer.stop ? page.tree(answer.stop) : !answer.stop_check && page.note("Not measured."), answer.stop_check && page.checkOf(answer.stop_check)),
        page.section("Contract of the saved model", answer.contract && Object.keys(answer.contract).length ? page.tree(answer.contract) : page.note("No contract is saved.")),
        page.section("Golden prompts", goldens.length ? page.cut(goldens, 20, (some) => some.map(goldenOf), "prompts", answer.num_left) : page.note("None are saved.")),
        others.map(([name, value]) => page.section(wordsOf(name), page.tree(value))),
      );
    };
    page.add(context.root, [page.node("h1", {}, "Model"), region]);
    await draw();
    return draw;
  };

  function goldenOf(golden) {
    const others = Object.entries(golden).filter(([name, value]) => !["prompt", "text"].includes(name) && value !== null);
    return page.node(
      "article",
      { class: "answer" },
      page.messages(golden.prompt),
      page.node("span", { class: "role" }, "answer"),
      page.node("div", { class: "said" }, golden.text),
      others.length > 0 && page.folded("more", () => page.tree(Object.fromEntries(others))),
    );
  }
})(window.tautPage);
