// The quiz of claims: it asks what stands folded on this page, and shows the proofs that stand there. How questions are
// drawn and answers judged is as in labkit/course/claims/claim_quiz.py.
"use strict";
(() => {
  const part = (id) => document.getElementById(id);
  const quiz = part("quiz"), { depending } = quiz.dataset;
  const claims = [...document.querySelectorAll("details.claim")].filter((one) => one.dataset.answer).map((one) => ({
    id: one.id, ...one.dataset, words: one.querySelector(".words").textContent, proof: one.querySelector(".proof"),
  }));
  let questions = [], outcomes = [];

  function shuffled(list) {
    const drawn = [...list];
    for (let last = drawn.length - 1; last > 0; last--) {
      const place = Math.floor(Math.random() * (last + 1));
      [drawn[last], drawn[place]] = [drawn[place], drawn[last]];
    }
    return drawn;
  }

  function draw(count, topic) { // equally many of each answer, where there are enough
    const on = shuffled(claims.filter((claim) => !topic || claim.topic === topic));
    const answers = shuffled([...new Set(on.map((claim) => claim.answer))]);
    const piles = answers.map((answer) => on.filter((claim) => claim.answer === answer));
    const drawn = [];
    while (drawn.length < count && piles.some((pile) => pile.length)) {
      drawn.push(...piles.filter((pile) => pile.length).map((pile) => pile.pop()));
    }
    return shuffled(drawn.slice(0, count));
  }

  function offered(claim) { // its own condition if it has one, then those of its topic, which are harder to tell apart
    const others = shuffled(claims.filter((other) => other.condition && other !== claim));
    const near = others.filter((other) => other.topic === claim.topic);
    const far = others.filter((other) => !near.includes(other));
    const conditions = new Set([claim, ...near, ...far].map((one) => one.condition).filter(Boolean));
    return shuffled([...conditions].slice(0, Number(quiz.dataset.offered)));
  }

  function judge(claim, answer, condition) {
    if (answer !== claim.answer) return 0;
    return answer === depending && condition !== claim.condition ? 0.5 : 1;
  }

  function show(...shown) {
    for (const id of ["answers", "conditions", "next"]) part(id).hidden = !shown.includes(id);
  }

  function ask() {
    const claim = questions[outcomes.length];
    part("asked").hidden = !claim;
    if (!claim) return finish();
    part("place").textContent = `${outcomes.length + 1} of ${questions.length} · ${claim.topic} · ${claim.id}`;
    part("claim").textContent = claim.words;
    part("outcome").textContent = "";
    part("proof").replaceChildren();
    const legend = part("conditions").firstElementChild;
    part("conditions").replaceChildren(legend, ...offered(claim).map((words, place) => {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: `${place + 1} ${words}` });
      button.addEventListener("click", () => answered(depending, words));
      return button;
    }));
    show("answers");
    part("claim").focus();
  }

  function choose(answer) {
    if (answer !== depending) return answered(answer, "");
    show("conditions");
    part("conditions").querySelector("button").focus();
  }

  function answered(answer, condition) {
    const claim = questions[outcomes.length], points = judge(claim, answer, condition);
    outcomes.push({ claim, points });
    part("outcome").textContent = `${part("outcome").dataset[`points-${points * 2}`]}: ${claim.truth}.`;
    part("proof").replaceChildren(claim.proof.cloneNode(true));
    part("next").textContent = outcomes.length < questions.length ? "Next" : "The result";
    show("next");
    part("next").focus();
  }

  function finish() {
    const points = outcomes.reduce((sum, outcome) => sum + outcome.points, 0);
    const [result, list] = part("score").children;
    result.textContent = `${points} of ${outcomes.length} point${outcomes.length === 1 ? "" : "s"}`;
    list.replaceChildren(...outcomes.filter((outcome) => outcome.points < 1).map(({ claim }) => {
      const item = document.createElement("li"), places = claim.proof.querySelector(".places");
      item.textContent = `look again: ${claim.id} ${claim.words}`;
      if (places) item.append(places.cloneNode(true));
      return item;
    }));
    part("score").hidden = false;
    part("score").focus();
  }

  part("begin").addEventListener("submit", (event) => {
    event.preventDefault();
    const { topic, count } = event.target.elements;
    [questions, outcomes] = [draw(Number(count.value), topic.value), []];
    part("score").hidden = true;
    ask();
  });
  part("answers").addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) choose(button.dataset.answer);
  });
  part("next").addEventListener("click", ask);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.repeat || event.target.closest("input, select")) return;
    if (part("asked").hidden) return;
    const choices = ["answers", "conditions"].filter((id) => !part(id).hidden)
      .flatMap((id) => [...part(id).querySelectorAll("button")]);
    const button = choices.find((one, place) => event.key === (one.dataset.answer || `${place + 1}`)[0]);
    if (!button) return;
    event.preventDefault();
    button.click();
  });
  for (const hidden of document.querySelectorAll("[data-needs-script]")) hidden.hidden = false;
})();
