// Questions of a static page: a number is committed, kept in this browser, and drawn beside law and measurement.
// What may be typed, and every word about a number, are those of labkit/view/units.py; a browser test compares the two.
"use strict";

function general(value, digits) { // Python's f"{value:,.{digits}g}"
  if (value === 0) return "0";
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  const exponent = Number(power);
  if (exponent < -4 || exponent >= digits) {
    return `${Number(mantissa)}e${exponent < 0 ? "-" : "+"}${String(Math.abs(exponent)).padStart(2, "0")}`;
  }
  const [whole, part] = value.toFixed(digits - 1 - exponent).split(".");
  const rest = (part || "").replace(/0+$/, "");
  return commas(whole) + (rest ? `.${rest}` : "");
}

const RAISED = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

function plain(value, digits) { // plain_text
  const [mantissa, power] = general(value, digits).split("e");
  if (power === undefined) return mantissa;
  if (Number(power) > 0 && Math.abs(value) < 1e15) return commas(Number(`${mantissa}e${power}`).toFixed(0));
  return `${mantissa}·10${[...String(Number(power))].map((letter) => RAISED[letter]).join("")}`;
}

const commas = (whole) => whole.replace(/\B(?=(\d{3})+$)/g, ",");
const short = (value) => (Math.abs(value) < 1000 ? general(value, 3) : commas(value.toFixed(0)));

function inLargest(value, units) {
  const [unit, size] = units.find(([, size]) => Math.abs(value) >= size) || units.at(-1);
  return `${short(value / size)} ${unit}`;
}

function singular(nouns) {
  if (/^[a-z]+(ss|x|ch|sh)es$/.test(nouns)) return nouns.slice(0, -2);
  return /^[a-z]{3,}[^s]s$/.test(nouns) ? nouns.slice(0, -1) : nouns;
}

function words(value, unit) { // value_text
  if (unit === "B") {
    const large = Math.abs(value) >= 10_000;
    const exact = large && Number.isInteger(value) && Math.abs(value) < 1e15 ? `${commas(value.toFixed(0))} B = ` : "";
    const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
    return exact + (large ? inLargest(value, units) : `${general(value, 6)} B`);
  }
  if (unit === "s") return inLargest(value, [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]);
  const noun = value === 1 ? singular(unit) : unit;
  return `${plain(value, Math.abs(value) >= 1000 ? 6 : 4)} ${noun}`.trim();
}

function apart(value, seen, base) { // how far a number is from what was seen
  if (value === seen) return "exact";
  if (seen === 0) return `${base} is 0`;
  const ratio = value / seen;
  if (ratio < 0) return `${plain(Math.abs(value - seen), 3)} ${value > seen ? "above" : "below"} ${base}`;
  if (ratio === 0 || (ratio >= 0.5 && ratio <= 2)) {
    return `${general(100 * Math.abs(ratio - 1), 3)}% ${ratio > 1 ? "above" : "below"} ${base}`;
  }
  return `${ratio >= 100 && ratio < 1e9 ? commas(ratio.toFixed(0)) : plain(ratio, 3)} times ${base}`;
}

function parsed(typed, unit, scales) { // the number, or NaN
  const match = typed.replace(/[,_]/g, "").trim().match(/^([-+.\deE]+)\s*([^\s\d]*)$/);
  if (!match || !/\d/.test(match[1])) return NaN;
  const suffix = match[2].toLowerCase();
  const factor = suffix === "" || suffix === unit.toLowerCase() ? 1 : scales[suffix];
  const value = Number(match[1]) * factor;
  return value >= 0 && value < Infinity ? value : NaN;
}

const predictions = {
  place: (name) => `labkit:${location.pathname.split("/").at(-1)}:${name}`,
  load(name) {
    try { return localStorage.getItem(this.place(name)); } catch { return null; } // a browser may forbid it
  },
  keep(name, typed) {
    try { localStorage.setItem(this.place(name), typed); } catch { /* then it lasts as long as the page */ }
  },
};

const committed = new Map(); // the name of a question -> its number

function draw(table) {
  const { law, seen, base, unit } = JSON.parse(table.dataset.numbers);
  const value = committed.get(table.dataset.name);
  const numbers = { law, seen, prediction: value };
  const longest = Math.max(...Object.values(numbers).map((number) => Math.abs(number || 0))) || 1;
  for (const [side, number] of Object.entries(numbers)) {
    const row = table.querySelector(`tr.${side}`);
    if (row) row.querySelector("i").style.width = `${(100 * Math.abs(number)) / longest}%`;
  }
  const row = table.querySelector("tr.prediction");
  row.hidden = false;
  row.querySelector(".words").textContent =
    words(value, unit) + (seen === null ? "" : ` (${apart(value, seen, base)})`);
}

function commit(form, typed) {
  const { name, unit, scales } = form.dataset;
  const status = form.querySelector(".status");
  const value = parsed(typed, unit, JSON.parse(scales));
  if (Number.isNaN(value)) {
    const still = committed.has(name) ? `; still ${words(committed.get(name), unit)}` : "";
    status.textContent = `“${typed}” is not a number${unit && ` of ${unit}`}, 0 or more${still}. Use digits, as in 1,024 or 2e6.`;
    return;
  }
  committed.set(name, value);
  predictions.keep(name, typed);
  document.querySelectorAll(`table.bars[data-name="${name}"]`).forEach(draw);
  for (const fold of document.querySelectorAll("details[data-waits]")) {
    const waits = fold.dataset.waits.split(" ");
    if (waits.includes(name) && waits.every((question) => committed.has(question))) fold.open = true;
  }
  status.textContent = `You predict ${words(value, unit)}. `;
  const answer = [...document.querySelectorAll("details.answer")].find((fold) => fold.dataset.waits.split(" ").includes(name));
  if (answer) {
    answer.querySelector("summary").textContent = "The answer.";
    const link = document.createElement("a");
    link.href = `#${encodeURIComponent(answer.id)}`;
    link.textContent = "See how far off that is.";
    status.append(link);
  }
}

for (const form of document.querySelectorAll("form.question")) {
  const field = form.elements.number;
  form.querySelector(".row").hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    commit(form, field.value);
  });
  const typed = predictions.load(form.dataset.name);
  if (typed !== null) {
    field.value = typed;
    commit(form, typed);
  }
}
