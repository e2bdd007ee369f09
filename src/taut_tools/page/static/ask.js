// Where answers come from: those in this file, or the server's. That is the only difference between the two.
"use strict";
(function (page) {
  const block = document.getElementById("answers");
  const answers = block === null ? null : JSON.parse(block.textContent);

  page.isFile = answers !== null;

  /** An answer that cannot be shown; its message is a line for the reader. */
  page.Unanswered = class extends Error {};

  /** The answer to a question: ask("overview", "run name", {step: 3}). Without a run, of all runs. A list is joined by commas. */
  page.ask = async function (question, run, parameters) {
    const key = keyOf(question, run, parameters);
    return page.isFile ? embedded(key) : fetched(`answers/${key}`);
  };

  /** Whether there may be an answer: a file has a selection. */
  page.has = (question, run, parameters) => !page.isFile || Object.hasOwn(answers, keyOf(question, run, parameters));

  function keyOf(question, run, parameters) {
    const written = (value) => (Array.isArray(value) ? value : [value]).map(encodeURIComponent).join(",");
    const query = Object.entries(parameters || {})
      .filter(([, value]) => value !== null && value !== undefined)
      .map(([name, value]) => `${name}=${written(value)}`)
      .join("&");
    const path = run === null || run === undefined ? question : `run/${encodeURIComponent(run)}/${question}`;
    return query && !(page.isFile && question === "curves") ? `${path}?${query}` : path; // a file has all curves in one answer
  }

  function embedded(key) {
    if (!Object.hasOwn(answers, key)) {
      throw new page.Unanswered(`This is not in this file; a page that is served has it: ${page.inFile().command}`);
    }
    const found = answers[key];
    if (found !== null && found.error) throw new page.Unanswered(found.error.message);
    return found;
  }

  /** What the file says of itself: {text, num_left, command}. */
  page.inFile = () => (answers !== null && answers.file) || { text: "", num_left: 0, command: "taut page DIR" };

  async function fetched(address) {
    let response, body;
    try {
      response = await fetch(address, { credentials: "same-origin", cache: "no-store" });
      body = await response.json();
    } catch (error) {
      throw new page.Unanswered(`The server does not answer (${error.message}). Is taut page still running?`);
    }
    if (response.ok) return body;
    throw new page.Unanswered((body && body.error && body.error.message) || `The server answered ${response.status}.`);
  }

  /**
   * Hear of runs that have grown: `grown(run)`, null for any; and of the connection: `tell("live" | "lost")`. A page that
   * is not seen does not listen: a browser has few connections to one server.
   */
  page.listen = function (grown, tell) {
    if (answers !== null) return;
    let source = null;
    let isFirst = true;
    const open = () => {
      source = new EventSource("answers/events");
      source.addEventListener("open", () => {
        tell("live");
        if (!isFirst) grown(null);
        isFirst = false;
      });
      source.addEventListener("error", () => {
        tell("lost");
        if (source !== null && source.readyState === EventSource.CLOSED) setTimeout(again, 5000);
      });
      source.addEventListener("message", (message) => grown(JSON.parse(message.data).run));
    };
    const again = () => {
      if (source !== null) source.close();
      source = null;
      if (!document.hidden) open();
    };
    document.addEventListener("visibilitychange", again);
    again();
  };
})(window.tautPage);
