// A card to be reviewed: space shows its back, 1 to 5 rate it. Python holds the box; nothing comes from the network.
const RATINGS = ["nothing came", "only when I saw it", "with effort", "well", "at once"];

function render({ model, el }) {
  const made = (tag, parent, attributes = {}, words = "") => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = words;
    parent.append(node);
    return node;
  };
  const say = (message) => model.send(message);

  // JupyterLab's shortcuts (1 makes a heading of a cell, space scrolls) stay out of here
  const root = made("div", el, {
    class: "lk-film lk-review",
    tabindex: 0,
    role: "group",
    "data-lm-suppress-shortcuts": "true",
    "aria-label": "cards to review: space shows the answer, 1 to 5 rate it",
  });
  const bar = made("div", root, { class: "lk-review-bar" });
  const menu = (name, every) => {
    const choice = made("select", bar, { "aria-label": name });
    const fill = () => {
      choice.replaceChildren();
      made("option", choice, { value: "" }, every);
      for (const each of model.get(`${name}s`)) made("option", choice, { value: each }, name === "lab" ? `lab ${each}` : each);
      choice.value = model.get(name);
    };
    choice.addEventListener("change", () => {
      model.set(name, choice.value);
      model.save_changes();
      root.focus();
    });
    fill();
    return fill;
  };
  const menus = [menu("tag", "all tags"), menu("lab", "all labs")];
  const standing = made("span", bar, { "aria-live": "polite" });
  const face = made("div", root, { class: "lk-review-face", "aria-live": "polite" });
  const answer = made("div", root, { class: "lk-review-answer", "aria-live": "polite" });
  const buttons = made("div", root, { class: "lk-review-bar" });
  const show = made("button", buttons, { type: "button" }, "show (space)");
  show.addEventListener("click", () => {
    say({ do: "show" });
    root.focus();
  });
  const rates = RATINGS.map((words, place) => {
    const button = made("button", buttons, { type: "button", title: words }, `${place + 1} ${words}`);
    made("small", button); // when the card would come again
    button.addEventListener("click", () => {
      say({ do: "rate", rating: place + 1 });
      root.focus();
    });
    return button;
  });
  const note = made("div", root, { class: "lk-review-told", "aria-live": "polite" });

  root.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const rating = "12345".indexOf(event.key) + 1;
    if (event.key !== " " && !(event.key.length === 1 && rating)) return;
    event.stopPropagation();
    if (event.target.tagName === "BUTTON" && event.key === " ") return; // the button hears it by itself
    event.preventDefault();
    if (event.repeat) return; // a key that is held is one answer
    say(rating ? { do: "rate", rating } : { do: "show" });
  });

  const draw = () => {
    const card = model.get("answer") !== "";
    face.innerHTML = model.get("face");
    answer.innerHTML = model.get("shown") ? model.get("answer") : "";
    lead(answer, model.get("addresses"));
    standing.textContent = model.get("standing");
    note.textContent = model.get("note");
    show.hidden = !card || model.get("shown");
    rates.forEach((button, place) => {
      button.hidden = !card || !model.get("shown");
      button.lastChild.textContent = model.get("spans")[place] || "";
    });
  };
  const redraw = () => {
    for (const fill of menus) fill();
    draw();
  };
  const watched = ["face", "answer", "shown", "standing", "note", "spans"].map((name) => `change:${name}`);
  for (const each of watched) model.on(each, draw);
  for (const each of ["change:tag", "change:lab"]) model.on(each, redraw);
  draw();
  return () => {
    for (const each of watched) model.off(each, draw);
    for (const each of ["change:tag", "change:lab"]) model.off(each, redraw);
  };
}
export default { render };
