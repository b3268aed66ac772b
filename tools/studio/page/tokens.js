// An answer token by token, coloured by a figure.

import { api, choice, field, figure, h, message } from "./ui.js";

/** Figure -> its name, what the colours mean, the tint of a value, and its strength from 0 to 1. `most`: the largest
 * absolute value of the answer. */
const SCALES = {
  logprobs: ["log-probability", "the stronger, the less likely the token was when it was sampled", () => "bad", (value) => -value / 5],
  ratios: ["ratio", "green: more likely under the weights of the trainer than when it was sampled; red: less likely", sign, (value) => Math.abs(Math.log(value)) / Math.LN2, Math.log],
  advantages: ["advantage", "green: the update makes it more likely; red: less likely", sign, (value, most) => Math.abs(value) / most],
  entropy: ["entropy", "the stronger, the more alternatives there were", () => "accent", (value, most) => value / most],
  versions: ["version of the weights", "the stronger, the newer the weights", () => "accent", null],
  mask: ["trained on", "coloured: trained on", () => "good", (value) => 0.6 * value],
};

function sign(value) {
  return value > 0 ? "good" : "bad";
}

/** Return the button that shows the tokens of an answer, and their place. */
export function byToken(sample, run) {
  const box = h("div", { class: "tokens" });
  const show = async () => {
    let found;
    try {
      found = await api(`run/${run.id}/tokens`, { step: sample.step, episode: sample.episode, index: sample.index });
    } catch (error) {
      box.replaceChildren(message(error.message));
      return;
    }
    const names = Object.keys(SCALES).filter((name) => found.figures[name]);
    const pieces = h("pre", { class: "text" }), hint = h("span", { class: "muted" });
    const draw = (name) => { hint.textContent = SCALES[name][1]; pieces.replaceChildren(...coloured(found, name, names)); };
    box.replaceChildren(h("div", { class: "bar slim" }, field("colour", choice(names.map((name) => [name, SCALES[name][0]]), names[0], draw)), hint), pieces,
      found.has_texts ? "" : message("The tokenizer is not in the given folders: tokens are shown by number."),
      found.left_out ? message(`${figure(found.left_out)} more tokens`) : "");
    draw(names[0]);
  };
  return [h("button", { type: "button", onclick: show }, "Token by token"), box];
}

function coloured(found, name, names) {
  const [, , tint, strength, shift] = SCALES[name];
  const values = found.figures[name], versions = found.figures.versions;
  const most = Math.max(1e-12, ...values.map(Math.abs));
  const sampled = versions.filter((version) => version >= 0), oldest = Math.min(...sampled), newest = Math.max(...sampled);
  const age = (value) => 0.15 + 0.85 * (newest > oldest ? (value - oldest) / (newest - oldest) : 0.5);
  return found.texts.map((text, i) => {
    const said = names.map((one) => `${SCALES[one][0]} ${figure(found.figures[one][i])}`).join(", ");
    if (versions[i] < 0) return h("span", { class: "given", title: "given, not sampled" }, found.has_texts ? text : `${text} `);
    const piece = h("span", { title: `${text} (token ${found.ids[i]}): ${said}` }, found.has_texts ? text : `${text} `);
    const share = Math.min(1, Math.max(0, strength ? strength(values[i], most) : age(values[i])));
    piece.style.background = `color-mix(in srgb, var(--${tint(shift ? shift(values[i]) : values[i])}) ${Math.round(65 * share)}%, transparent)`;
    return piece;
  });
}
