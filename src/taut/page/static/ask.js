// Where answers come from: those in this file, or the server's. That is the only difference between the two.
"use strict";
(function (page) {
  const block = document.getElementById("answers");
  const answers = block === null ? null : JSON.parse(block.textContent);

  page.isFile = answers !== null;

  /** An answer that cannot be shown; its message is a line for the reader. */
  page.Unanswered = class extends Error {};

  /** The answer to a question: ask("overview", "run name", {step: 3}). Without a run, of all runs. */
  page.ask = async function (question, run, parameters) {
    const given = Object.entries(parameters || {}).filter(([, value]) => value !== null && value !== undefined);
    const path = run === null || run === undefined ? question : `run/${run}/${question}`;
    if (answers !== null) {
      const plain = question === "curves" ? [] : given;
      const key = plain.length ? `${path}?${plain.map(([name, value]) => `${name}=${value}`).join("&")}` : path;
      if (Object.hasOwn(answers, key)) return answers[key];
      const serve = (answers.runs && answers.runs.serve) || "taut page DIRECTORY";
      throw new page.Unanswered(`This is not in this file. ${serve} serves it.`);
    }
    const escaped = run === null || run === undefined ? question : `run/${encodeURIComponent(run)}/${question}`;
    const query = given.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&");
    return fetched(`answers/${escaped}${query ? `?${query}` : ""}`);
  };

  /** Whether a question has its answer here without asking anyone. */
  page.has = (path) => answers === null || Object.hasOwn(answers, path);

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

  /** Hear of runs that have grown: `grown({run, step, state})`, and of the connection: `state("live" | "lost")`. */
  page.listen = function (grown, state) {
    if (answers !== null) return;
    const source = new EventSource("answers/events");
    source.addEventListener("open", () => state("live"));
    source.addEventListener("error", () => {
      state("lost");
      if (source.readyState === EventSource.CLOSED) setTimeout(() => page.listen(grown, state), 5000);
    });
    source.addEventListener("message", (message) => grown(JSON.parse(message.data)));
  };
})(window.tautPage);
