// Shows one of the frames that Python drew; needs nothing from the network.
function render({ model, el }) {
  const last = () => model.get("frames").length - 1;
  const go = (step) => {
    model.set("step", Math.max(0, Math.min(step, last())));
    model.save_changes();
  };
  const made = (tag, parent, attributes) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    parent.append(node);
    return node;
  };

  const root = made("div", el, {
    class: "lk-film",
    tabindex: 0,
    role: "group",
    "aria-label": `${model.get("name")}: left and right arrow keys step, Home and End jump`,
  });
  const bar = made("div", root, { class: "lk-film-bar" });
  const button = (words, label, act) => {
    const node = made("button", bar, { type: "button", "aria-label": label, title: label });
    node.textContent = words;
    node.addEventListener("click", act);
    return node;
  };
  const back = button("◀", "previous step", () => go(model.get("step") - 1));
  const slider = made("input", bar, { type: "range", min: 0, max: last(), step: 1, "aria-label": "step" });
  slider.addEventListener("input", () => go(Number(slider.value)));
  const next = button("▶", "next step", () => go(model.get("step") + 1));

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
  const longest = Math.max(0, ...model.get("words").map((words) => words.length)); // so that no frame moves the next
  const count = made("span", bar, { "aria-live": "polite", style: `min-width: min(100%, ${longest}ch)` });
  const stage = made("div", root, { class: "lk-film-stage" });

  root.addEventListener("keydown", (event) => {
    const jump = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (jump === undefined) return;
    event.stopPropagation(); // arrow keys mean "next cell" to the notebook
    if (event.target === slider) return; // the slider steps by itself
    event.preventDefault();
    go(model.get("step") + jump);
  });

  const draw = () => {
    const step = model.get("step");
    stage.innerHTML = model.get("frames")[step];
    slider.max = last();
    slider.value = step;
    back.setAttribute("aria-disabled", step === 0); // not disabled: that would take the focus, and with it the keys
    next.setAttribute("aria-disabled", step === last());
    const words = model.get("words")[step] || `step ${step} of ${last()}`; // the values of a control, or a number
    count.textContent = words;
    slider.setAttribute("aria-valuetext", words);
  };
  model.on("change:step", draw);
  model.on("change:frames", draw);
  draw();
  return () => {
    clearInterval(timer);
    model.off("change:step", draw);
    model.off("change:frames", draw);
  };
}
export default { render };
