// Tokens, colored by a number that each of them has. A long text is drawn in chunks as they scroll into view.
"use strict";
(function (page) {
  const CHUNK = 300;
  const LONGEST_CHUNK = 600; // a chunk ends with a line where it can
  const NATS = [0.1, 0.3, 0.7, 1.5, 3, 5, 8];
  const RATIOS = [0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2];
  const SPECIAL = /^<[|\uff5c]?[^<>\s]{1,40}[|\uff5c]?>$|^\[\/?[A-Z_]{2,20}\]$/;

  /** How a number becomes one of the colors: `levels(values)` gives the limits and the class of each number. */
  const SCALES = {
    loss: { label: "loss", title: "loss: \u2212logprob in nats", steps: () => sequence("warm", NATS) },
    weight: { label: "weight", title: "weight in the loss", steps: (values) => sequence("cool", even(values, 7)) },
    advantage: { label: "advantage", title: "advantage", steps: around },
    entropy: { label: "entropy", title: "entropy of the prediction in nats", steps: () => sequence("warm", NATS) },
    ratio: { label: "ratio", title: "ratio: probability now over that when it was sampled", steps: () => diverging(RATIOS) },
    logprob: { label: "logprob", title: "\u2212logprob in nats when it was sampled", steps: () => sequence("warm", NATS) },
  };

  function sequence(hue, limits) {
    return { limits, classOf: (level) => `${hue}-${level}` };
  }

  function diverging(limits) {
    const half = limits.length / 2;
    return { limits, classOf: (level) => (level === half ? "even" : level < half ? `less-${half - level}` : `more-${level - half}`) };
  }

  const largest = (values) => values.reduce((high, value) => (page.isNumber(value) ? Math.max(high, Math.abs(value)) : high), 0) || 1;

  function even(values, count) {
    const most = largest(values);
    return Array.from({ length: count }, (_, index) => ((index + 0.5) / count) * most);
  }

  function around(values) {
    const most = largest(values);
    const up = [0.01, 0.25, 0.5, 0.75].map((part) => part * most);
    return diverging([...up.map((limit) => -limit).reverse(), ...up]);
  }

  function levelOf(limits, value) {
    let level = 0;
    while (level < limits.length && value >= limits[level]) level++;
    return level;
  }

  /** The text of a token as it is shown: line ends, tabs and nothing at all are seen. */
  function shown(piece) {
    if (piece === "") return "\u00b7";
    return piece.replaceAll("\r\n", "\u21b5\n").replaceAll(/(?<!\u21b5)\n/g, "\u21b5\n").replaceAll("\t", "\u21e5\t");
  }

  /** A token's name within a sentence. */
  page.tokenName = (piece) => JSON.stringify(piece);

  /**
   * Tokens: {pieces, ids, from, to, values: {loss: [number or null for each token], ...}, facts(index): [[name, text]],
   * isContext(index), numShared, color, label}. Those that are shown together may have one scale (`scaledBy`: all their
   * numbers) and one place for facts (`factsAt`). `recolor(name)` colors them by another number.
   */
  page.tokens = function (given) {
    const { pieces, values } = given;
    const from = given.from || 0;
    const to = given.to === undefined ? pieces.length : given.to;
    let color = given.color;
    let scale = null;
    let current = -1;
    const chunks = [];
    const legend = page.node("div", { class: "legend" });
    const facts = given.factsAt || page.factsPlace();
    const text = page.node("div", {
      class: "tokens",
      tabindex: "0",
      role: "group",
      "aria-label": `${given.label}: ${page.counted(to - from, "token")}. Left and right arrow keys go from token to token.`,
      "data-key": `tokens ${given.label}`,
    });

    const seen = new IntersectionObserver(
      (entries) => {
        for (const entry of entries) if (entry.isIntersecting) draw(entry.target.chunk);
      },
      { rootMargin: "1200px" },
    );

    for (let start = from; start < to; ) {
      let stop = Math.min(to, start + CHUNK);
      if (to - from <= 2 * LONGEST_CHUNK) stop = to;
      else while (stop < to && stop < start + LONGEST_CHUNK && !pieces[stop - 1].includes("\n")) stop++;
      chunks.push(chunkOf(start, stop));
      start = stop;
    }
    for (const chunk of chunks) {
      text.append(chunk.node);
      seen.observe(chunk.node);
    }

    function chunkOf(start, stop) {
      const made = page.node("div", { class: "chunk" });
      const chunk = { start, stop, node: made, isDrawn: false };
      let letters = 0;
      let ends = 0;
      for (let index = start; index < stop; index++) {
        letters += pieces[index].length;
        if (pieces[index].includes("\n")) ends++;
      }
      const lines = Math.max(1, Math.ceil(letters / 110), ends);
      if (chunksAreMany()) made.style.containIntrinsicSize = `auto ${lines * 24}px`;
      made.classList.toggle("is-part", chunksAreMany());
      made.chunk = chunk;
      return chunk;
    }

    function chunksAreMany() {
      return to - from > 2 * LONGEST_CHUNK;
    }

    function draw(chunk) {
      if (chunk.isDrawn) return;
      chunk.isDrawn = true;
      const all = document.createDocumentFragment();
      for (let index = chunk.start; index < chunk.stop; index++) {
        const made = document.createElement("span");
        made.index = index;
        made.className = classOf(index);
        made.textContent = page.visible(shown(pieces[index]));
        all.append(made);
      }
      chunk.node.replaceChildren(all);
    }

    function classOf(index) {
      let name = "t";
      const value = values[color] ? values[color][index] : null;
      if (given.isContext(index)) name += " context";
      if (page.isNumber(value)) name += ` ${scale.classOf(levelOf(scale.limits, value))}`;
      else if (value === "nan" || value === "inf" || value === "-inf") name += " not-finite";
      if (index < given.numShared) name += " shared";
      if (SPECIAL.test(pieces[index])) name += " special";
      if (pieces[index] === "") name += " nothing";
      return name;
    }

    function recolor(name) {
      color = name;
      scale = SCALES[name].steps((given.scaledBy || values)[name] || []);
      for (const chunk of chunks) {
        if (!chunk.isDrawn) continue;
        for (const made of chunk.node.children) made.className = classOf(made.index) + (made.index === current ? " at" : "");
      }
      page.fill(legend, legendOf(name, scale, (given.scaledBy || values)[name]));
    }

    function spanOf(index) {
      const chunk = chunks.find((one) => index >= one.start && index < one.stop);
      if (chunk === undefined) return null;
      draw(chunk);
      return chunk.node.children[index - chunk.start];
    }

    /** Make a token the current one. */
    function go(index, isScrolled) {
      const made = spanOf(index);
      if (made === null) return;
      const before = current < 0 ? null : spanOf(current);
      if (before) before.classList.remove("at");
      current = index;
      made.classList.add("at");
      if (isScrolled) made.scrollIntoView({ block: "nearest" });
      page.fill(facts, factsOf(index));
    }

    function factsOf(index) {
      const pairs = [
        ["token", page.number(index)],
        ["id", given.ids ? String(given.ids[index]) : ""],
        ["text", page.node("code", {}, page.tokenName(pieces[index]))],
        ...given.facts(index),
      ];
      return page.pairs(pairs);
    }

    text.addEventListener("mouseover", (event) => {
      if (event.target.index !== undefined) go(event.target.index, false);
    });
    text.addEventListener("focus", () => {
      if (current < 0 && to > from) go(firstTarget(), false);
    });
    text.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const moves = { ArrowRight: current + 1, ArrowLeft: current - 1, Home: from, End: to - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      go(Math.min(to - 1, Math.max(from, moves[event.key])), true);
    });

    function firstTarget() {
      for (let index = from; index < to; index++) if (!given.isContext(index)) return index;
      return from;
    }

    recolor(color);
    if (chunks.length) draw(chunks[0]);
    return {
      text,
      legend,
      facts,
      recolor,
      go: (index) => {
        go(index, true);
        text.focus({ preventScroll: true });
      },
      destroy: () => seen.disconnect(),
    };
  };

  /** Where what is known of a token is told. */
  page.factsPlace = () =>
    page.node("div", { class: "facts", role: "status" }, page.node("span", { class: "muted" }, "Point at a token, or focus the text and use the arrow keys."));

  function legendOf(name, scale, values) {
    const known = (values || []).filter(page.isNumber);
    if (!known.length) return page.node("span", { class: "muted" }, `No ${name} is recorded here.`);
    const { limits, classOf } = scale;
    const swatches = [];
    for (let level = 0; level <= limits.length; level++) {
      const text =
        level === 0 ? `< ${page.number(limits[0], 3)}` : level === limits.length ? `\u2265 ${page.number(limits[level - 1], 3)}` : page.number(limits[level - 1], 3);
      swatches.push(page.node("span", { class: `swatch ${classOf(level)}` }, text));
    }
    return [page.node("span", { class: "label" }, SCALES[name].title), page.node("span", { class: "swatches" }, swatches)];
  }
})(window.tautPage);
