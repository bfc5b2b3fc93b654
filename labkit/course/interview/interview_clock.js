function render({ model, el }) {
  const made = (tag, name, parent) => {
    const node = document.createElement(tag);
    node.className = name;
    parent.append(node);
    return node;
  };
  const root = made("div", "lk-clock", el);
  root.setAttribute("role", "timer");
  const question = made("span", "lk-clock-question", root);
  const track = made("span", "lk-clock-track", root);
  const bar = made("span", "lk-clock-bar", track);
  track.setAttribute("aria-hidden", "true");
  const session = made("span", "lk-clock-session", root);
  const told = made("span", "lk-clock-told", el);
  told.setAttribute("aria-live", "polite");
  const words = (s) => `${Math.floor(s / 60)}:${String(Math.floor(s) % 60).padStart(2, "0")}`;
  const say = (node, said) => { if (node.textContent !== said) node.textContent = said; };
  let since = performance.now();
  const draw = () => {
    if (!model.get("beat")) return; // nobody has set it yet
    const gone = (performance.now() - since) / 1000;
    const used = model.get("used_s") + (model.get("shown") ? 0 : gone);
    const left = Math.max(0, model.get("left_s") - gone);
    const budget = model.get("budget_s");
    const over = used > budget;
    say(question, `this question ${words(used)} of ${words(budget)}${over ? ", over" : ""}`);
    say(session, `${words(left)} left`);
    bar.style.width = `${Math.min(100, (100 * used) / Math.max(1, budget))}%`;
    root.classList.toggle("lk-clock-over", over);
    say(told, left === 0 ? "The time is over: this is the last question."
      : over && !model.get("shown") ? "Over the time of this question." : "");
  };
  const again = () => { since = performance.now(); draw(); };
  const seen = () => { if (!document.hidden) model.send({ ask: "now" }); };
  model.on("change:beat", again);
  document.addEventListener("visibilitychange", seen);
  const timer = setInterval(draw, 250);
  again();
  seen();
  return () => {
    clearInterval(timer);
    model.off("change:beat", again);
    document.removeEventListener("visibilitychange", seen);
  };
}
export default { render };
