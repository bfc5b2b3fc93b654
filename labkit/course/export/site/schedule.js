// The schedule of cards as labkit/course/cards/box.py has it: the same ratings give the same dates, as a test sees that
// compares both. Memory (stability and difficulty) is ts-fsrs's. The steps of a card that is being learned are those
// of Python's fsrs: ts-fsrs rounds them to whole minutes. Times are milliseconds since 1970, spans of the settings are
// seconds.
const LEARNING = 1, REVIEW = 2, RELEARNING = 3;
const FORGOTTEN = 1, HARD = 2, GOOD = 3;
const DAY_MS = 86_400_000;
const gradeOf = (rating) => Math.max(FORGOTTEN, rating - 1); // 1 and 2 of the five ratings are both "forgotten"

function schedule(FSRS, settings) {
  const algorithm = new FSRS.FSRS({
    w: settings.parameters,
    request_retention: settings.desired_retention,
    maximum_interval: settings.maximum_interval,
    relearning_steps: settings.relearning_steps.map((seconds) => `${seconds / 60}m`),
    enable_short_term: true,
    enable_fuzz: false,
  });

  // The state, the step in it, and the seconds until the next step; null where the interval follows from the memory.
  function stepped(state, step, grade) {
    const learned = [REVIEW, null, null];
    const steps = state === LEARNING ? settings.learning_steps : settings.relearning_steps;
    const learning = state === LEARNING ? LEARNING : RELEARNING;
    if (grade === FORGOTTEN) return steps.length ? [learning, 0, steps[0]] : learned;
    if (state === REVIEW || step >= steps.length) return learned;
    if (grade === GOOD && step + 1 < steps.length) return [state, step + 1, steps[step + 1]];
    if (grade !== HARD) return learned;
    const first = steps.length > 1 ? (steps[0] + steps[1]) / 2 : steps[0] * 1.5;
    return [state, step, step === 0 ? first : steps[step]];
  }

  // A card after a grade; `card` is null for a new one.
  function reviewed(card, grade, at) {
    const days = card ? Math.floor((at - card.last) / DAY_MS) : 0;
    const { stability, difficulty } = algorithm.next_state(card, days, grade);
    const [state, step, seconds] = stepped(card ? card.state : LEARNING, card ? card.step : 0, grade);
    const wait = seconds === null ? algorithm.next_interval(stability, days) * DAY_MS : seconds * 1000;
    return { state, step, stability, difficulty, last: at, due: at + wait };
  }

  // How likely it is that a card is still known; 0 for a new one.
  function recall(card, now) {
    if (!card) return 0;
    return algorithm.forgetting_curve(Math.max(0, Math.floor((now - card.last) / DAY_MS)), card.stability);
  }

  // The cards after these reviews, by id. Times never go back, and none lies after now.
  function replayed(reviews, now) {
    const cards = new Map();
    for (const { card, rating, at } of reviews) {
      const before = cards.get(card) || null;
      const time = Math.max(Math.min(Date.parse(at), now), before ? before.last : -Infinity);
      cards.set(card, reviewed(before, gradeOf(rating), time));
    }
    return cards;
  }

  // When a card would be due after each rating from 1 to 5.
  function foreseen(card, now) {
    const at = Math.max(now, card ? card.last : now);
    return [1, 2, 3, 4, 5].map((rating) => reviewed(card, gradeOf(rating), at).due);
  }

  return { replayed, recall, foreseen };
}
