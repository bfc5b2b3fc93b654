// A page that reviews cards without a kernel: the panel is that of the notebook (review_panel.js), what stands behind
// it is here. Reviews are kept in this browser, in the form of the files that `labkit cards --export` writes.
const data = JSON.parse(document.getElementById("data").textContent);
const { replayed, recall, foreseen } = schedule(FSRS, data.scheduler);
const PLACE = "labkit:cards", DAMAGED = "labkit:cards:damaged", FILE = "labkit_cards.json";

// Sentences, as labkit/course/cards/review_words.py makes them.
const sentence = (occasion, words) => data.sentences[occasion].replace(/\{(\w+)\}/g, (_, name) => words[name]);
const counted = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const span = (ms) => {
  const unit = data.spans.find(([, seconds]) => ms >= 950 * seconds);
  return unit ? counted(Math.floor(ms / 1000 / unit[1] + 0.5), unit[0]) : data.sentences.short;
};

const FIELDS = {
  uid: (value) => typeof value === "string" && value.length >= 16 && value.length <= 64,
  card: (value) => typeof value === "string" && value.length >= 1 && value.length <= 200,
  rating: (value) => [1, 2, 3, 4, 5].includes(value),
  at: (value) => /^\d{4}-\d\d-\d\dT.*(Z|[+-]\d\d:\d\d)$/.test(value) && Number.isFinite(Date.parse(value)),
  seconds: (value) => Number.isFinite(value) && value >= 0,
};

function reviewsIn(text) { // the reviews of a file; an error in words if it is none
  let plain;
  try { plain = JSON.parse(text); } catch { throw new Error("it is no JSON"); }
  const whole = plain && plain.format === data.format && Array.isArray(plain.reviews);
  if (!whole) throw new Error("it holds no reviews of cards");
  if (plain.version > data.version) throw new Error("a later labkit wrote it");
  plain.reviews.forEach((review, place) => {
    const wrong = Object.keys(FIELDS).find((field) => !FIELDS[field](review[field]));
    if (wrong) throw new Error(`${wrong} of review ${place + 1} is wrong`);
  });
  return plain.reviews;
}

// The reviews that this browser keeps. Another window may write them as well: they are read before each writing.
function log() {
  let late = []; // what the browser would not keep lasts as long as this page
  let note = "";
  let read = { text: null, reviews: [] }; // years of reviews are read once, and then when they change
  const putAside = (text) => {
    note = `What this browser had kept cannot be read. It was put aside, under the name ${DAMAGED}. `;
    localStorage.setItem(DAMAGED, text);
    localStorage.removeItem(PLACE);
  };
  const stored = () => {
    let text = null;
    try {
      text = localStorage.getItem(PLACE);
      if (text !== read.text) read = { text, reviews: text === null ? [] : reviewsIn(text) };
      return read.reviews;
    } catch { // a browser may forbid it, or the text is damaged
      try { if (text !== null) putAside(text); } catch { /* there is no room: it stays where it is */ }
      return [];
    }
  };
  const all = (others = []) => [...new Map([...stored(), ...late, ...others].map((one) => [one.uid, one])).values()];
  const written = (reviews) => JSON.stringify({ format: data.format, version: data.version, reviews }, null, 1);
  const add = (others) => { // how many of them are new
    const before = all().length, reviews = all(others);
    try {
      localStorage.setItem(PLACE, written(reviews));
      late = [];
    } catch {
      late = reviews;
      note = "This browser keeps nothing for this page: export your reviews before you leave. ";
    }
    return reviews.length - before;
  };
  return { all, add, note: () => note, text: () => written(all()) };
}

// The box of cards (labkit/course/cards/box.py): what is due, and what a rating does.
function boxOf(reviews) {
  const dayOf = (ms) => new Date(ms).toDateString();
  const cards = () => replayed(reviews.all(), Date.now());
  const chosen = (tag, lab) => data.cards
    .filter((card) => (!tag || card.tags.includes(tag)) && (!lab || card.labs.includes(lab)));
  const due = (tag, lab) => { // most forgotten first, then new ones, the easier first
    const now = Date.now(), standing = cards();
    const old = chosen(tag, lab).filter((card) => standing.has(card.id) && standing.get(card.id).due <= now);
    const fresh = chosen(tag, lab).filter((card) => !standing.has(card.id)).sort((a, b) => a.difficulty - b.difficulty);
    const first = new Map(reviews.all().reverse().map((review) => [review.card, Date.parse(review.at)]));
    const begun = [...first.values()].filter((at) => dayOf(at) === dayOf(now)).length;
    const known = new Map(old.map((card) => [card, recall(standing.get(card.id), now)]));
    return [...old.sort((a, b) => known.get(a) - known.get(b)), ...fresh.slice(0, Math.max(0, data.new - begun))];
  };
  const rate = (card, rating, seconds) => {
    const bytes = [...crypto.getRandomValues(new Uint8Array(16))];
    const uid = bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
    reviews.add([{ uid, card, rating, at: new Date().toISOString(), seconds }]);
    return cards().get(card).due;
  };
  const streak = () => { // days in a row, up to today or yesterday
    const days = new Set(reviews.all().map((review) => dayOf(Math.min(Date.parse(review.at), Date.now()))));
    const day = new Date();
    day.setHours(12); // a day of 23 hours must not be skipped
    if (!days.has(dayOf(day))) day.setDate(day.getDate() - 1);
    let length = 0;
    for (; days.has(dayOf(day)); day.setDate(day.getDate() - 1)) length += 1;
    return length;
  };
  const next = (tag, lab) => { // when the next card of those that were begun is due; undefined if there is none
    const standing = cards(), begun = chosen(tag, lab).map((card) => standing.get(card.id)).filter(Boolean);
    return begun.map((card) => card.due).sort((a, b) => a - b)[0];
  };
  const progress = (tag, lab) => {
    const standing = cards(), begun = chosen(tag, lab).map((card) => standing.get(card.id)).filter(Boolean);
    return {
      due: begun.filter((card) => card.due <= Date.now()).length,
      new: chosen(tag, lab).length - begun.length,
      begun: begun.filter((card) => card.state !== REVIEW).length,
      learned: begun.filter((card) => card.state === REVIEW).length,
      all: counted(chosen(tag, lab).length, "card"),
    };
  };
  return { due, rate, streak, next, progress, foreseen: (id) => foreseen(cards().get(id), Date.now()) };
}

// What stands behind the panel in place of a kernel (review_panel.py): the same values, set by the same messages.
function kernel(box, reviews, changed) {
  const model = pageModel({ tags: data.tags, labs: data.labs, addresses: data.addresses, tag: "", lab: "" });
  let card = null, done = 0, since = 0;
  const update = (values) => Object.entries(values).forEach(([name, value]) => model.set(name, value));
  const ask = (before = "") => {
    const tag = model.get("tag"), lab = model.get("lab"), due = box.due(tag, lab), now = Date.now();
    card = due[0] || null;
    const next = card ? null : box.next(tag, lab);
    update({
      shown: false,
      face: card ? card.front : next ? sentence("next", { span: span(next - now) }) : "",
      answer: card ? card.back : "",
      spans: card ? box.foreseen(card.id).map((at) => span(at - now)) : [],
      standing: sentence(card ? "to_go" : "none", { due: due.length, done, days: counted(box.streak(), "day") }),
      note: before + reviews.note(),
    });
    since = performance.now();
    changed(box.progress(tag, lab));
  };
  const send = (message) => { // what review_panel.py hears
    if (card === null) return;
    if (message.do === "show") update({ shown: true });
    if (message.do !== "rate" || !model.get("shown")) return;
    const { id } = card, due = box.rate(id, message.rating, (performance.now() - since) / 1000);
    done += 1;
    ask(sentence("rated", { card: id, span: span(due - Date.now()) }));
  };
  Object.assign(model, { send, save_changes: () => ask() }); // a menu has another choice
  ask();
  return { model, ask, idle: () => card === null };
}

const reviews = log(), box = boxOf(reviews);
const progress = document.getElementById("progress"), message = document.getElementById("message");
const { model, ask, idle } = kernel(box, reviews, (counts) => { progress.textContent = sentence("progress", counts); });
const panel = document.getElementById("panel");
panel.replaceChildren(); // what it says to a browser without scripts
render({ model, el: panel });
setInterval(() => { if (idle()) ask(model.get("note")); }, 10_000); // a card that was forgotten comes within minutes

document.getElementById("export").addEventListener("click", () => {
  const address = URL.createObjectURL(new Blob([reviews.text()], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: address, download: FILE }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
  message.textContent = `${counted(reviews.all().length, "review")} written to ${FILE}`;
});
document.getElementById("import").addEventListener("change", async ({ target }) => {
  const [file] = target.files;
  if (!file) return;
  try {
    message.textContent = `${counted(reviews.add(reviewsIn(await file.text())), "review")} taken from ${file.name}`;
  } catch (error) {
    message.textContent = `Nothing was taken from ${file.name}: ${error.message}`;
  }
  target.value = ""; // the same file can be chosen once more
  ask();
});
for (const part of document.querySelectorAll("[data-needs-script]")) part.hidden = false;
