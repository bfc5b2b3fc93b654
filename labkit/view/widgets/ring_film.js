// Shows one of the pre-drawn frames; all drawing is done in Python.
function render({ model, el }) {
  const last = () => model.get("frames").length - 1;
  const root = document.createElement("div");
  root.className = "lk-film";
  root.tabIndex = 0;
  root.setAttribute("role", "group");
  root.setAttribute("aria-label", "film of a collective; left and right arrow keys step");
  const bar = document.createElement("div");
  const button = (words, label, act) => {
    const made = document.createElement("button");
    made.textContent = words;
    made.setAttribute("aria-label", label);
    made.addEventListener("click", act);
    bar.append(made);
    return made;
  };
  const go = (step) => {
    model.set("step", Math.max(0, Math.min(step, last())));
    model.save_changes();
  };
  button("◀", "previous step", () => go(model.get("step") - 1));
  const slider = document.createElement("input");
  slider.type = "range";
  slider.min = 0;
  slider.max = last();
  slider.setAttribute("aria-label", "step");
  slider.addEventListener("input", () => go(Number(slider.value)));
  bar.append(slider);
  button("▶", "next step", () => go(model.get("step") + 1));
  let timer = null;
  const stop = () => {
    clearInterval(timer);
    timer = null;
    play.textContent = "play";
  };
  const play = button("play", "play or pause", () => {
    if (timer) return stop();
    if (model.get("step") >= last()) go(0);
    play.textContent = "pause";
    timer = setInterval(() => (model.get("step") >= last() ? stop() : go(model.get("step") + 1)), 900);
  });
  const count = document.createElement("span");
  count.setAttribute("aria-live", "polite");
  bar.append(count);
  const stage = document.createElement("div");
  root.addEventListener("keydown", (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
    if (jump === undefined || event.target === slider) return;
    event.preventDefault();
    event.stopPropagation(); // arrow keys mean "next cell" to the notebook
    go(model.get("step") + jump);
  });
  const draw = () => {
    const step = model.get("step");
    stage.innerHTML = model.get("frames")[step];
    slider.value = step;
    count.textContent = ` step ${step} of ${last()}`;
  };
  model.on("change:step", draw);
  root.append(bar, stage);
  el.append(root);
  draw();
  return () => clearInterval(timer);
}
export default { render };
