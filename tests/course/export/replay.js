// Replays reviews as the page of cards does, in node: {package, script, settings, reviews, now} on standard input, the
// card after each review on standard output.
const { package: source, script, settings, reviews, now } = JSON.parse(require("fs").readFileSync(0, "utf8"));
const FSRS = {};
new Function("exports", "module", source)(FSRS, {});
const { replayed } = new Function("FSRS", "settings", `${script}; return schedule(FSRS, settings);`)(FSRS, settings);
const cards = reviews.map(({ card }, place) => {
  const before = reviews.slice(0, place + 1).filter((review) => review.card === card);
  return replayed(before, now).get(card);
});
console.log(JSON.stringify(cards));
