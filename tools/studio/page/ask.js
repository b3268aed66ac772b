// Ask the current weights of a run something. They are counted as evaluation; nothing of it is trained on.

import { api, figure, h, message } from "./ui.js";

export async function askPage({ content, run, alive, studio }) {
  const said = h("span", { class: "muted", role: "status" });
  const talk = h("div", { class: "talk", "aria-live": "polite" });
  content.append(h("div", { class: "bar" }, h("h1", {}, "Ask the current weights"), said), talk);
  if (!run.questions) {
    talk.append(message(whyNoQuestions(run)));
    return null;
  }
  if (!studio.may_run) {
    talk.append(message("The studio asks nothing unless it was started with --allow-run."));
    return null;
  }
  let messages = [];
  const text = h("textarea", { class: "yaml question", "aria-label": "question", placeholder: "A prompt as in the data set", onkeydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(); } });
  const button = h("button", { type: "button", class: "main", title: "Ctrl and Enter", onclick: send }, "Ask");
  const again = h("button", { type: "button", onclick: () => { messages = []; talk.replaceChildren(); said.textContent = ""; text.focus(); } }, "New conversation");
  content.append(text, h("div", { class: "bar" }, button, again));
  said.textContent = "Answers are sampled as in training, counted as evaluation, and not trained on.";

  async function send() {
    const question = text.value;
    if (!question.trim() || button.disabled) return;
    const asked = [...messages, { role: "user", content: question }];
    button.disabled = true;
    said.textContent = "Sampling…";
    try {
      const answer = await api(`run/${run.id}/ask`, {}, { messages: asked });
      if (!alive()) return;
      messages = [...asked, { role: "assistant", content: answer.text }];
      text.value = "";
      const weights = answer.versions ? `weights of ${answer.versions[0] === answer.versions[1] ? `version ${answer.versions[0]}` : `versions ${answer.versions.join(" to ")}`}` : "no token";
      talk.append(h("div", { class: "turn environment" }, h("span", { class: "by" }, "question"), h("pre", { class: "text" }, question)),
        h("div", { class: "turn model" }, h("span", { class: "by" }, `${figure(answer.tokens)} tokens, ${weights}${answer.finish_reason === "length" ? ", cut off" : ""}`), h("pre", { class: "text answer" }, answer.text)));
      said.textContent = "";
    } catch (error) {
      said.textContent = error.message;
    } finally {
      button.disabled = false;
      text.focus();
    }
  }
  text.focus();
  return null;
}

/** Return why a run answers no questions. */
export function whyNoQuestions(run) {
  return run.state === "running"
    ? "This run answers no questions: it was started without monitor.questions=true."
    : "This run has ended. Questions are answered while a run with monitor.questions=true is under way.";
}
