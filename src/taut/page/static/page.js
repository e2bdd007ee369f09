"use strict";
const embedded = document.getElementById("answers");
const answers = embedded ? JSON.parse(embedded.textContent) : null;

async function ask(question) {
  if (answers) return answers[question] ?? { error: { message: "not in this file" } };
  return (await fetch(`answers/${question}`)).json();
}

async function show() {
  const page = document.getElementById("page");
  for (const run of (await ask("runs")).runs) {
    const text = document.createElement("pre");
    text.textContent = JSON.stringify(await ask(`run/${encodeURIComponent(run.name)}/overview`), null, 1);
    page.append(text);
  }
}

show();
