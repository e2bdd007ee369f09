// Nodes, numbers and places. Everything that a view writes goes through `node`, which makes text nodes and nothing else:
// text of models and data is never read as markup, and characters that are not seen are shown by their names.
"use strict";
(function () {
  const page = (window.tautPage = { views: {} });

  // Controls but tab and newline, soft hyphen, directional and zero-width marks (the two joiners are part of words and
  // emoji), tag characters, lone surrogates.
  const UNSEEN =
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|\p{Cs}/gu;

  /** The text with every character that is not seen, or that moves others, written by its name. */
  page.visible = function (text) {
    return String(text).replace(UNSEEN, (character) => {
      const code = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
      return `\u27e8U+${code}\u27e9`;
    });
  };

  /** An element: node("a", {class: "x", href: "#/", on: {click}}, children). Strings become text. */
  page.node = function (tag, attributes, ...children) {
    const made = document.createElement(tag);
    set(made, attributes);
    page.add(made, children);
    return made;
  };

  /** An element of an SVG. */
  page.svg = function (tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    set(made, attributes);
    page.add(made, children);
    return made;
  };

  function set(made, attributes) {
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name === "on") {
        for (const [kind, listener] of Object.entries(value)) made.addEventListener(kind, listener);
      } else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value !== null && value !== undefined) {
        made.setAttribute(name, name === "href" ? value : page.visible(value));
      }
    }
  }

  page.add = function (parent, children) {
    for (const child of children.flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      parent.append(child instanceof Node ? child : document.createTextNode(page.visible(child)));
    }
    return parent;
  };

  /** Replace what is in a region; what had the focus has it again, if it is there again (by data-key). */
  page.fill = function (region, ...children) {
    const held = region.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
    region.replaceChildren();
    page.add(region, children);
    if (held !== undefined) {
      for (const found of region.querySelectorAll("[data-key]")) {
        if (found.dataset.key === held) return found.focus({ preventScroll: true });
      }
    }
  };

  // -- numbers

  page.isNumber = (value) => typeof value === "number" && Number.isFinite(value);

  /** A number as text with so many digits; a count with its thousands apart. */
  page.number = function (value, digits = 4) {
    if (value === null || value === undefined) return "";
    if (typeof value === "boolean") return value ? "yes" : "no";
    if (!page.isNumber(value)) return String(value);
    const size = Math.abs(value);
    let text;
    if (Number.isInteger(value) && size < 1e15) text = size.toLocaleString("en-US");
    else if (size >= 1e6 || size < 1e-4) text = size.toExponential(digits - 1).replace("e+", "e").replace(/\.?0+e/, "e");
    else text = Number(size.toPrecision(digits)).toLocaleString("en-US", { maximumSignificantDigits: digits });
    return (value < 0 ? "\u2212" : "") + text;
  };

  /** As number, and with its sign. */
  page.signed = (value, digits) => (page.isNumber(value) && value > 0 ? "+" : "") + page.number(value, digits);

  /** A reward or the like: as many decimals for each, so that they stand below each other. */
  page.fixed = function (value, decimals = 3) {
    if (!page.isNumber(value)) return page.number(value);
    return (value < 0 ? "\u2212" : "") + Math.abs(value).toFixed(decimals);
  };

  page.counted = (count, one, many = one + "s") => `${page.number(count)} ${count === 1 ? one : many}`;

  page.mean = function (values) {
    const found = (values || []).filter(page.isNumber);
    return found.length ? found.reduce((sum, value) => sum + value, 0) / found.length : null;
  };

  page.time = function (seconds) {
    if (!page.isNumber(seconds)) return "";
    const at = new Date(seconds * 1000);
    const two = (value) => String(value).padStart(2, "0");
    return (
      `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ` +
      `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`
    );
  };

  page.seconds = function (value) {
    if (!page.isNumber(value)) return "";
    if (value < 60) return `${page.number(value, 3)} s`;
    const minutes = Math.floor(value / 60);
    if (minutes < 60) return `${minutes} min ${Math.floor(value % 60)} s`;
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };

  // -- places: #/run/NAME/VIEW?a=b and #/compare?runs=a,b

  page.place = function (view, run, parameters) {
    const path = run === null || run === undefined ? `#/${view}` : `#/run/${encodeURIComponent(run)}/${view}`;
    const query = Object.entries(parameters || {})
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`)
      .join("&");
    return query ? `${path}?${query}` : path;
  };

  /** The fragment's view, run and parameters. */
  page.readPlace = function (fragment) {
    const [path, query] = fragment.replace(/^#?\/?/, "").split(/\?(.*)/s);
    const parameters = Object.fromEntries(new URLSearchParams(query || ""));
    const parts = path.split("/");
    if (parts[0] !== "run") return { view: parts[0] || "runs", run: null, parameters };
    let run = parts[1] || "";
    try {
      run = decodeURIComponent(run);
    } catch (error) {
      if (!(error instanceof URIError)) throw error; // a stray % stands for itself
    }
    return { view: parts[2] || "overview", run, parameters };
  };

  page.link = (text, href, attributes) => page.node("a", { href, "data-key": href, ...attributes }, text);

  // -- pieces that views share

  /** A heading with what belongs to it at its right. */
  page.section = (title, ...children) => page.node("section", {}, page.node("h2", {}, title), children);

  page.note = (...children) => page.node("p", { class: "note" }, children);

  /** A folded part. `draw` is called once, when it is opened first. */
  page.folded = function (title, draw, options = {}) {
    const body = page.node("div", { class: "folded-body" });
    const made = page.node(
      "details",
      { class: options.class },
      page.node("summary", { "data-key": `fold ${options.key || title}` }, page.node("span", {}, title), options.beside),
      body,
    );
    let isDrawn = false;
    const open = () => {
      if (!made.open || isDrawn) return;
      isDrawn = true;
      page.add(body, [draw()]);
    };
    made.addEventListener("toggle", open);
    made.addEventListener("toggle", () => options.onToggle && options.onToggle(made.open));
    if (options.isOpen) {
      made.open = true;
      open();
    }
    return made;
  };

  /** A table. Columns: [title, class]; a row is a list of cells, or {class, cells}. */
  page.table = function (columns, rows, options = {}) {
    const head = columns.map(([title, kind]) => page.node("th", { scope: "col", class: kind }, title));
    const made = rows.map((row) => {
      const cells = Array.isArray(row) ? row : row.cells;
      return page.node(
        "tr",
        { class: Array.isArray(row) ? null : row.class },
        cells.map((cell, index) => page.node("td", { class: columns[index][1] }, cell)),
      );
    });
    return page.node(
      "div",
      { class: "scroll-x", tabindex: "0", role: "region", "aria-label": options.label || "Table" },
      page.node("table", { class: options.class }, page.node("thead", {}, page.node("tr", {}, head)), page.node("tbody", {}, made)),
    );
  };

  /** The first of a long list, and a button that shows as many more. `draw(items)` gives a node of some of them. */
  page.cut = function (items, count, draw, unit, numMore = 0) {
    const place = page.node("div", {});
    let shown = count;
    const show = () => {
      const left = items.length - shown;
      page.fill(
        place,
        draw(items.slice(0, shown)),
        left > 0 &&
          page.node(
            "button",
            {
              type: "button",
              class: "more",
              "data-key": "more",
              on: {
                click: () => {
                  shown += count;
                  show();
                },
              },
            },
            `${page.number(Math.min(count, left))} more of ${page.number(left)} ${unit}`,
          ),
        left <= 0 && numMore > 0 && page.note(`and ${page.number(numMore)} more ${unit}`),
      );
    };
    show();
    return place;
  };

  /** Whatever JSON holds, as rows of names and values. */
  page.tree = function (value) {
    if (value === null || value === undefined || value === "") return page.node("span", { class: "muted" }, "none");
    if (Array.isArray(value)) {
      if (!value.length) return page.node("span", { class: "muted" }, "none");
      if (value.every((item) => typeof item !== "object" || item === null)) {
        return page.node("span", {}, value.map((item) => page.number(item)).join(", "));
      }
      return page.cut(value, 50, (items) => page.node("ol", { class: "plain" }, items.map((item) => page.node("li", {}, page.tree(item)))), "entries");
    }
    if (typeof value === "object") {
      return page.pairs(Object.entries(value).map(([name, item]) => [name, page.tree(item)]));
    }
    return page.node("span", { class: "value" }, page.number(value, 6));
  };

  page.pairs = (pairs) =>
    page.node(
      "dl",
      { class: "pairs" },
      pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [
        page.node("dt", {}, name),
        page.node("dd", {}, value),
      ]),
    );

  /** Buttons of which one is pressed. Choices: [value, label, key]. */
  page.choice = function (label, choices, value, choose) {
    const buttons = choices.map(([name, text, key]) =>
      page.node(
        "button",
        {
          type: "button",
          "aria-pressed": String(name === value),
          "data-key": `${label} ${name}`,
          "aria-keyshortcuts": key,
          on: {
            click: () => {
              mark(name);
              choose(name);
            },
          },
        },
        text,
      ),
    );
    const mark = (name) => {
      choices.forEach(([other], index) => buttons[index].setAttribute("aria-pressed", String(other === name)));
    };
    const made = page.node("div", { class: "choice", role: "group", "aria-label": label }, page.node("span", { class: "label" }, label), buttons);
    return { node: made, press: (name) => buttons[choices.findIndex(([other]) => other === name)].click() };
  };

  /** A control with its label. */
  page.field = (label, control) => page.node("label", { class: "field" }, page.node("span", { class: "label" }, label), control);

  page.select = function (label, choices, value, choose) {
    const made = page.node(
      "select",
      { "data-key": label, on: { change: () => choose(made.value) } },
      choices.map(([name, text]) => page.node("option", { value: name, selected: name === value }, text)),
    );
    return page.field(label, made);
  };
})();
